"""The backends for model folders: `tokenizers` runs tokenizer.json, or transformers loads the folder as trainers do."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers

from tokentape.audit import _model_files as model_files
from tokentape.audit._skew import backends
from tokentape.chat._generation_blocks import cut_marks, has_blocks, with_marks
from tokentape.chat._template import ChatTemplate, plain_message, read_source
from tokentape.chat._tokenizer_files import from_text, is_refusal, named_special_tokens, read_json, refuse_short_merges
from tokentape.errors import InvalidRequest, TemplateRefused, TokenizerUnusable

_FLAGS = ("content", "special", "lstrip", "rstrip", "normalized", "single_word")
_READ = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", *model_files.PROCESSOR_FILES, "config.json",
    "generation_config.json", "special_tokens_map.json", "added_tokens.json", *model_files.OTHER_FILES,
)  # fmt: skip


class TemplateBackend(backends.Backend):
    """The base class of backends that render a chat template in this process."""

    _options: backends.BackendOptions
    _template: ChatTemplate | None

    def render(self, conversation: backends.SkewChat) -> backends.Rendering:
        text = self.rendered_text(self._template, conversation)
        return backends.Rendering(self.encode([text])[0], text)

    def rendered_text(self, template: ChatTemplate | None, conversation: backends.SkewChat) -> str:
        if template is None:
            raise TemplateRefused("there is no chat template")
        date = self._options.date or datetime.now(UTC).date().isoformat()
        return render_text(template, conversation, date, self.facts.template_variables)


def render_text(
    template: ChatTemplate, conversation: backends.SkewChat, date: str, variables: Mapping[str, Any]
) -> str:
    """Render a conversation as servers and trainers do. Raises `TemplateRefused` and `InvalidRequest`."""
    messages = [plain_message(message) for message in conversation.messages]
    how: dict[str, Any] = {"add_generation_prompt": conversation.generate, "date": date, "variables": variables}
    return template.render(messages, tools=conversation.tools, **how)


class SpecBackend(TemplateBackend):
    """Runs a tokenizer.json with `tokenizers`. `spec` and `config` are parsed, `source` is the text of `spec`."""

    def __init__(
        self,
        name: str,
        spec: Mapping[str, Any],
        *,
        source: str | None = None,
        kind: str = "tokenizer.json",
        config: Mapping[str, Any] | None = None,
        template: ChatTemplate | None = None,
        options: backends.BackendOptions | None = None,
        files: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
        folder: Path | None = None,
        reopened_as: str | None = None,
    ) -> None:
        self._tokenizer = load_spec(spec, source)
        config = config or {}
        self._template = template
        self._marked = with_marks(template) if template is not None and has_blocks(template.source) else None
        self._options = options or backends.BackendOptions()
        self.reopened_as = reopened_as
        special_tokens = named_special_tokens(config)
        abilities: set[backends.Ability] = {"special", "decode", "controls"}
        if template is not None:
            abilities |= {"render", "mask"} if self._marked is not None else {"render"}
        vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        self.facts = backends.BackendFacts(
            name=name,
            kind=kind,
            abilities=frozenset(abilities),
            versions={"tokenizers": version("tokenizers")},
            files=files or {},
            spec=spec,
            added=_added(self._tokenizer.get_added_tokens_decoder()),
            vocab_size=vocab_size,
            template=template.source if template else None,
            tool_template=template.tool_use_source if template else None,
            templates=model_files.named_templates(folder) if folder and self._options.template is None else None,
            configuration=model_files.model_configuration(folder) if folder else None,
            max_length=model_files.max_length(folder) if folder else None,
            loading=model_files.loading_settings(folder, spec) if folder else None,
            date=self._options.date,
            template_variables={**special_tokens, **self._options.kwargs},
            special_tokens=special_tokens,
            cleans_up=config.get("clean_up_tokenization_spaces"),
            notes=tuple(notes),
        )

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """See `Backend`. Raises `InvalidRequest` for invalid Unicode, `TokenizerUnusable` for other failures."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
            return [encoding.ids for encoding in encodings]
        except TypeError as error:
            raise InvalidRequest("a text contains a lone surrogate, which is not valid Unicode") from error
        except BaseException as error:
            if not is_refusal(error):
                raise
            raise self._unusable("encode", error) from error

    def _unusable(self, what: str, error: BaseException) -> TokenizerUnusable:
        return TokenizerUnusable(f"{self.facts.name}: `tokenizers` loads it, but can't {what} with it: {error}")

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """See `Backend`. Raises `TokenizerUnusable` if the decoder fails."""
        try:
            return self._tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=False)
        except BaseException as error:
            if not is_refusal(error):
                raise
            raise self._unusable("decode", error) from error

    def render(self, conversation: backends.SkewChat) -> backends.Rendering:
        if self._marked is None:
            return super().render(conversation)
        text, spans = cut_marks(self.rendered_text(self._marked, conversation))
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        mask = [any(a < end and b > start for a, b in spans) for start, end in encoding.offsets]
        return backends.Rendering(encoding.ids, text, mask)

    def token(self, token_id: int) -> str | None:
        return self._tokenizer.id_to_token(token_id)


def open_json(name: str, path: str | Path, options: backends.BackendOptions) -> SpecBackend:
    """Open a model folder, or a single tokenizer.json. Raises `TokenizerUnusable` if it can't be read."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise TokenizerUnusable(
            f"no tokenizer.json in {folder}. For other files, put the kind before the path: spm:, "
            "tiktoken:, mistral: or gguf:"
        )
    config = read_json(folder / "tokenizer_config.json")
    notes = ["tokenizer_config.json has `auto_map`: the folder's code is not run"] if "auto_map" in config else []
    try:
        source = file.read_bytes().decode()
        spec = json.loads(source)
    except ValueError as error:
        raise TokenizerUnusable(f"{file} is not JSON: {error}") from None
    return SpecBackend(
        name,
        spec,
        source=source,
        config=config,
        template=find_template(folder, config, options),
        options=options,
        files=hashes(folder) if path.is_dir() else {file.name: hash_file(file)},
        notes=notes,
        folder=folder if path.is_dir() else None,
        reopened_as=f"json:{path}",
    )


class AutoBackend(backends.Backend):
    """Runs AutoTokenizer on a local folder, without running code in the folder and without downloads."""

    use_fast = True

    def __init__(self, name: str, path: str, options: backends.BackendOptions) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise TokenizerUnusable("transformers is not installed; run: pip install 'tokentape[hf]'") from None
        if (file := Path(path) / "tokenizer.json").is_file():
            refuse_short_merges(file.read_text(encoding="utf-8", errors="replace"))
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                path, use_fast=self.use_fast, local_files_only=True, trust_remote_code=False
            )
        except BaseException as error:  # transformers raises the errors of its tokenizers and files
            if not is_refusal(error):
                raise
            raise TokenizerUnusable(f"AutoTokenizer can't load {path}: {type(error).__name__}: {error}") from error
        if options.template is not None:
            tokenizer.chat_template = read_source(options.template)
        self._tokenizer, self._options, self.reopened_as = tokenizer, options, name
        spec = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else None
        variants = tokenizer.chat_template
        variants = variants if isinstance(variants, dict) else {"default": variants}
        template = variants.get("default")
        other_templates = {key: source for key, source in variants.items() if key not in ("default", "tool_use")}
        abilities: set[backends.Ability] = {"special", "decode", "controls"}
        if template is not None:
            abilities |= {"render", "mask"} if has_blocks(template) and spec is not None else {"render"}
        special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        self.facts = backends.BackendFacts(
            name=name,
            kind=f"AutoTokenizer {type(tokenizer).__name__}",
            abilities=frozenset(abilities),
            versions={"transformers": version("transformers"), "tokenizers": version("tokenizers")},
            files=hashes(Path(path)),
            spec=spec,
            added=_added(tokenizer.added_tokens_decoder),
            vocab_size=len(tokenizer),
            template=template,
            tool_template=variants.get("tool_use"),
            templates=None if options.template is not None else other_templates,
            configuration=model_files.model_configuration(Path(path)),
            max_length=model_files.max_length(Path(path)),
            template_variables={**special_tokens, **options.kwargs},
            special_tokens=special_tokens,
            cleans_up=bool(tokenizer.clean_up_tokenization_spaces),
            notes=("templates use this machine's date, not the passed date",) if options.date is not None else (),
        )

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        how = {"add_special_tokens": special, "return_attention_mask": False, "return_token_type_ids": False}
        # transformers raises an error for an empty list.
        return list(self._tokenizer(list(texts), **how)["input_ids"]) if texts else []

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return [self._tokenizer.decode(list(ids), skip_special_tokens=False) for ids in sequences]

    def render(self, conversation: backends.SkewChat) -> backends.Rendering:
        """See `Backend`. Text parts are joined, as servers and trainers do before a template sees them."""
        plain = [(message, plain_message(message)) for message in conversation.messages]
        messages = [{key: value for key, value in flat.items() if key in message} for message, flat in plain]
        arguments = {
            "tools": list(conversation.tools) or None,
            "add_generation_prompt": conversation.generate,
            **self._options.kwargs,
        }
        masked = "mask" in self.facts.abilities
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
            out = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=masked, **arguments
            )
        except Exception as error:  # a template raises any error
            raise TemplateRefused(f"apply_chat_template failed: {type(error).__name__}") from error
        return backends.Rendering(
            out["input_ids"], text, [bool(flag) for flag in out["assistant_masks"]] if masked else None
        )

    def token(self, token_id: int) -> str | None:
        spelling: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return spelling


def same_tokenizer(a: AutoBackend, b: AutoBackend) -> bool:
    """Return True if transformers loaded equal tokenizers (parts and settings) from two folders."""
    spec_a, spec_b = ({**(side.facts.spec or {}), "truncation": None, "padding": None} for side in (a, b))
    names = ("special_tokens", "cleans_up", "vocab_size")
    switches = [[getattr(side.facts, name) for name in names] for side in (a, b)]
    splits = [side._tokenizer.split_special_tokens for side in (a, b)]
    return a.facts.spec is not None and spec_a == spec_b and switches[0] == switches[1] and splits[0] == splits[1]


def differing_sides(a: AutoBackend, b: AutoBackend) -> list[str]:
    """Describe differences in the sides on which transformers pads and truncates for two folders."""
    names = ("padding_side", "truncation_side")
    sides = [(name, getattr(a._tokenizer, name), getattr(b._tokenizer, name)) for name in names]
    return [f"{name} is {of_a} in A and {of_b} in B" for name, of_a, of_b in sides if of_a != of_b]


class SlowBackend(AutoBackend):
    """AutoTokenizer with `use_fast=False`."""

    use_fast = False


def require(module: str) -> Any:
    """Import a library from the extra `audit`. Raises `TokenizerUnusable` with the command that installs it."""
    try:
        return import_module(module)
    except ImportError:
        name = module.replace("_", "-")
        raise TokenizerUnusable(f"{name} is not installed; run: pip install 'tokentape[audit]'") from None


def load_spec(spec: Mapping[str, Any], source: str | None = None) -> tokenizers.Tokenizer:
    """Load a tokenizer.json (`source` is its text) without truncation and padding. Raises `TokenizerUnusable`."""
    tokenizer = from_text(source if source is not None else json.dumps(spec, ensure_ascii=False))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _added(decoder: Mapping[int, Any]) -> dict[str, backends.BackendToken]:
    """Return loaded tokens by content. A file may list a token twice, or with an id that `tokenizers` ignores."""
    return {
        token.content: backends.BackendToken(number, **{flag: getattr(token, flag) for flag in _FLAGS})
        for number, token in sorted(decoder.items())
    }


def find_template(folder: Path, config: Mapping[str, Any], options: backends.BackendOptions) -> ChatTemplate | None:
    if options.template is not None:
        return ChatTemplate(read_source(options.template))
    if not (folder / "chat_template.jinja").is_file() and not config.get("chat_template"):
        return None
    return ChatTemplate.load(folder, config)


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the files in a folder that tokenization depends on."""
    digests = {name: hash_file(folder / name) for name in _READ if (folder / name).is_file()}
    template = read_json(folder / model_files.CONFIG).get("chat_template")
    if template and "chat_template.jinja" in digests:
        digests[model_files.SHADOWED_TEMPLATE] = hashlib.sha256(json.dumps(template).encode()).hexdigest()
    return digests


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
