"""A side that is a tokenizer.json, in a file or put together, run by `tokenizers`, with a chat template if it has one.

Its template is rendered as transformers renders it: control tokens that messages spell are control tokens, and what the
template wrote is encoded without BOS and EOS of the tokenizer's own.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers

from tokentape.audit.skew.sides.base import Ability, BackendToken, Rendering, SideFacts, SkewChat
from tokentape.chat.template import ChatTemplate, plain_message, read_source
from tokentape.chat.tokenizer import from_text
from tokentape.errors import InvalidRequest, TemplateRefused, TokenizerUnusable

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_BEGIN, _END = "\U0010fffc", "\U0010fffd"
_READ = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
)


@dataclass(frozen=True, slots=True)
class SideOptions:
    """What a user may set for each side."""

    template: Path | None = None
    """A file to use in place of the template that the side comes with."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Template kwargs."""
    date: str | None = None
    """ISO 8601; None is today."""
    api_key: str | None = None
    """What a server wants as API key."""

    def day(self) -> str:
        """The date that templates are shown."""
        return self.date or datetime.now(UTC).date().isoformat()


class SpecSide:
    """What a tokenizer.json does. `config` is what a tokenizer_config.json says."""

    def __init__(
        self,
        name: str,
        spec: Mapping[str, Any],
        *,
        source: str | None = None,
        kind: str = "tokenizer.json",
        config: Mapping[str, Any] | None = None,
        template: ChatTemplate | None = None,
        options: SideOptions | None = None,
        files: Mapping[str, str] | None = None,
        versions: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
        controls: bool = True,
        embedding_rows: int = 0,
        reopened_as: str | None = None,
    ) -> None:
        self._tokenizer = load_spec(spec, source)
        config = config or {}
        self._template = template
        self._marked = ChatTemplate(_with_marks(template.source)) if template and makes_masks(template.source) else None
        self._options = options or SideOptions()
        self._reopened_as = reopened_as
        special_tokens = special_tokens_of(config)
        self._variables = {**special_tokens, **self._options.kwargs}
        abilities: set[Ability] = {"special", "decode"}
        if controls:
            abilities.add("controls")
        if template is not None:
            abilities.add("render")
        if self._marked is not None:
            abilities.add("mask")
        added = added_of(spec)
        ids = chain(self._tokenizer.get_vocab().values(), (token.id for token in added.values()))
        vocab_size = 1 + max(ids, default=-1)
        unused = (
            [f"ids {vocab_size} to {embedding_rows - 1} are rows of the embedding without a token: never sample them"]
            if embedding_rows > vocab_size
            else []
        )
        self.facts = SideFacts(
            name=name,
            kind=kind,
            abilities=frozenset(abilities),
            versions={"tokenizers": version("tokenizers"), **(versions or {})},
            files=files or {},
            spec=spec,
            added=added,
            vocab_size=vocab_size,
            template=template.source if template else None,
            template_variables=self._variables,
            special_tokens=special_tokens,
            cleans_up=config.get("clean_up_tokenization_spaces"),
            notes=(*notes, *unused),
        )

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """See `Side`. Raises `InvalidRequest` for text that is not valid Unicode."""
        try:
            return [one.ids for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)]
        except TypeError as error:
            raise InvalidRequest("a text holds a lone surrogate, which is not valid Unicode") from error

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """See `Side`."""
        return self._tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=False)

    def render(self, conversation: SkewChat) -> Rendering:
        """See `Side`."""
        if self._template is None:
            raise TemplateRefused("this side has no chat template")
        if self._marked is None:
            text = self._written(self._template, conversation)
            return Rendering(self.encode([text])[0], text)
        text, spans = _cut_marks(self._written(self._marked, conversation))
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        mask = [any(a < end and b > start for a, b in spans) for start, end in encoding.offsets]
        return Rendering(encoding.ids, text, mask)

    def _written(self, template: ChatTemplate, conversation: SkewChat) -> str:
        return template.render(
            [plain_message(message) for message in conversation.messages],
            tools=conversation.tools,
            add_generation_prompt=conversation.generate,
            date=self._options.day(),
            variables=self._variables,
        )

    def token(self, token_id: int) -> str | None:
        """See `Side`."""
        return self._tokenizer.id_to_token(token_id)

    def reopen(self) -> str | None:
        """See `Side`."""
        return self._reopened_as

    def close(self) -> None:
        """Nothing is held open."""


def open_json(name: str, path: Path, options: SideOptions) -> SpecSide:
    """A model folder, or a tokenizer.json by itself.

    Raises `TokenizerUnusable` if it can't be read.
    """
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise TokenizerUnusable(
            f"no tokenizer.json in {folder}. For other files say what they are: spm:, tiktoken:, mistral: or gguf:"
        )
    data = file.read_bytes()
    config = read_config(folder)
    notes = ["tokenizer_config.json has `auto_map`: code in the folder, not run here"] if "auto_map" in config else []
    try:
        source = data.decode()
        spec = json.loads(source)
    except ValueError as error:
        raise TokenizerUnusable(f"{file} is not JSON: {error}") from None
    return SpecSide(
        name,
        spec,
        source=source,
        config=config,
        template=find_template(folder, config, options),
        options=options,
        files=hashes(folder) if path.is_dir() else {file.name: hashlib.sha256(data).hexdigest()},
        notes=notes,
        embedding_rows=_embedding_rows(folder),
        reopened_as=f"json:{path}",
    )


def _embedding_rows(folder: Path) -> int:
    """How many rows a folder's config.json says there are; 0 if it does not."""
    path = folder / "config.json"
    if not path.is_file():
        return 0
    try:
        config = json.loads(path.read_bytes())
        return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0)
    except (ValueError, TypeError, AttributeError):
        return 0


def load_spec(spec: Mapping[str, Any], source: str | None = None) -> tokenizers.Tokenizer:
    """The tokenizer that a tokenizer.json describes, without truncation and padding. `source` is its text.

    Raises `TokenizerUnusable` if `tokenizers` does not take it.
    """
    if source is None:
        source = json.dumps(spec, ensure_ascii=False)
    tokenizer = from_text(source)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def added_of(spec: Mapping[str, Any]) -> dict[str, BackendToken]:
    """The added tokens of a tokenizer.json."""
    names = BackendToken.__dataclass_fields__
    return {
        token["content"]: BackendToken(**{key: value for key, value in token.items() if key in names})
        for token in spec.get("added_tokens") or ()
    }


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a tokenizer_config.json names."""
    found = {}
    for key in _SPECIAL_TOKENS:
        value = config.get(key)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[key] = text
    return found


def find_template(folder: Path, config: Mapping[str, Any], options: SideOptions) -> ChatTemplate | None:
    """The template that is to be used, if there is one."""
    if options.template is not None:
        return ChatTemplate(read_source(options.template))
    if not (folder / "chat_template.jinja").is_file() and not config.get("chat_template"):
        return None
    return ChatTemplate.load(folder, config)


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's tokenizer_config.json; empty if it has none.

    Raises `TokenizerUnusable` if it is not a JSON object.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise TokenizerUnusable(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise TokenizerUnusable(f"{path} holds a {type(config).__name__}, expected an object")
    return config


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the files of a folder that say how it tokenizes."""
    return {name: hash_file(folder / name) for name in _READ if (folder / name).is_file()}


def hash_file(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def makes_masks(template: str) -> bool:
    """Whether a template marks what carries loss, with `{% generation %}` blocks."""
    return _GENERATION.search(_COMMENT.sub("", template)) is not None


def _with_marks(template: str) -> str:
    """The template with what stands in `{% generation %}` blocks between two characters of its own.

    White space is taken away around the tags as it was around the blocks' own.
    """

    def marked(tag: re.Match[str]) -> str:
        before, end, after = tag.groups()
        mark = _END if end else _BEGIN
        return f"{{%{before} set _mark = 0 %}}{{{{ '{mark}' }}}}{{% set _mark = 0 {after}%}}"

    return _GENERATION.sub(marked, template)


def _cut_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and the ranges that stood between them."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    at = start = 0
    for piece in re.split(f"([{_BEGIN}{_END}])", text):
        if piece == _BEGIN:
            start = at
        elif piece == _END:
            spans.append((start, at))
        else:
            pieces.append(piece)
            at += len(piece)
    return "".join(pieces), spans
