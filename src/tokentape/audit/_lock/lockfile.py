"""Make, read and write lockfiles, which record the tokenization of a model as JSON.

Each part has its own line, so that `git diff` shows which parts a new lock changes. Small parts are stored in full,
large parts as digests of blocks. Settings that affect neither ids nor text, such as offsets, are left out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import tokenizers

from tokentape._batches import batched
from tokentape._durable import write_durably
from tokentape.audit import _model_files as model_files
from tokentape.audit._skew.merge_tables import Merge, merges_of
from tokentape.chat import _grammar as grammar
from tokentape.chat._certificate import Certificate
from tokentape.chat._certificate_cache import certifier_digest, load_or_certify
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._tokenizing import with_text_arguments
from tokentape.errors import InvalidRequest, TemplateRefused
from tokentape.types import Message, Tool

FORMAT = 1
TEXTS: Mapping[str, str] = json.loads(Path(__file__).with_name("goldens.json").read_text(encoding="utf-8"))
"""Texts by name. None of them spells a control token of a known model."""

_MOST_CONTROLS = 8


@dataclass(frozen=True, slots=True)
class LockGolden:
    """A golden input and its ids: a conversation, or a text if `messages` is empty."""

    name: str
    text: str = ""
    special: bool = False
    """True if the tokenizer adds special tokens such as BOS to the text."""
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    ids: tuple[int, ...] | None = None
    """None for a conversation that the template refuses."""

    def written(self) -> dict[str, Any]:
        ids = None if self.ids is None else list(self.ids)
        if not self.messages:
            return {"name": self.name, "text": self.text, **({"special": True} if self.special else {}), "ids": ids}
        tools = {"tools": list(self.tools)} if self.tools else {}
        return {"name": self.name, "messages": list(self.messages), **tools, "ids": ids}


def goldens_of(renderer: Renderer, template_kwargs: Mapping[str, Any]) -> tuple[LockGolden, ...]:
    frozen = []
    for golden in (*_texts(renderer.tokenizer), *_conversations()):
        # Some templates accept call arguments only as text.
        tried = (golden, replace(golden, messages=tuple(map(with_text_arguments, golden.messages))))
        attempts = (replace(form, ids=golden_ids(renderer, template_kwargs, form)) for form in tried)
        frozen.append(next((attempt for attempt in attempts if attempt.ids is not None), golden))
    return tuple(frozen)


def golden_ids(renderer: Renderer, template_kwargs: Mapping[str, Any], golden: LockGolden) -> tuple[int, ...] | None:
    """Return the ids of a text, or of a conversation with its generation prompt; None if the template refuses it."""
    if not golden.messages:
        return tuple(renderer.tokenizer.encode_plain(golden.text, add_special_tokens=golden.special))
    setup = grammar.setup(renderer.fingerprint, template_kwargs, tools=golden.tools, date=grammar.DATE)
    try:
        return tuple(renderer.render(golden.messages, setup).ids.tolist())
    except TemplateRefused:
        return None


def _texts(tokenizer: Tokenizer) -> Iterator[LockGolden]:
    for name, text in TEXTS.items():
        yield LockGolden(name, text)
    yield LockGolden("with special tokens", "Hello, world!", special=True)
    chosen = dict.fromkeys((*tokenizer.special_tokens.values(), *(control.content for control in tokenizer.controls)))
    for content in list(chosen)[:_MOST_CONTROLS]:
        yield LockGolden(f"control token {content}", f"a {content} b{content}\n{content}")


def _conversations() -> Iterator[LockGolden]:
    turns, system, question, then = grammar.TURNS, grammar.SYSTEM, grammar.QUESTION, grammar.NEXT
    first_result, second_result = grammar.result(1, " a resultword\n"), grammar.result(2, "another {resultword}")
    plain: dict[str, tuple[Message, ...]] = {
        "question": (question,),
        "system and question": (system, question),
        "second question": (system, grammar.EARLIER, turns["content"], then),
        "unicode and white space": (then, turns["unicode"], question, turns["white space"], question),
        "reasoning": (question, turns["reasoning"], then),
        "two user messages": (question, then),
    }
    calling: dict[str, tuple[Message, ...]] = {
        "tools": (system, question),
        "call and result": (question, turns["reasoning and call"], first_result),
        "parallel calls": (question, turns["parallel calls"], first_result, second_result),
        "typed arguments": (question, turns["typed arguments"], first_result, then),
        "multi-line argument": (question, turns["multi-line argument"], first_result),
    }
    for tools, conversations in (((), plain), ((grammar.TOOL,), calling)):
        for name, messages in conversations.items():
            yield LockGolden(f"conversation: {name}", messages=messages, tools=tools)


LIBRARIES = ("tokentape", "tokenizers", "jinja2", "transformers")

BLOCK = 4096
"""Vocabulary entries, or merges, per digest."""

_FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
    model_files.PROCESSOR_TEMPLATE, f"{model_files.TEMPLATES}/tool_use.jinja",
)  # fmt: skip
_PIPELINE = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_STEPS = (*_PIPELINE, "model")
_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
_LONG = 1024
_MOST_UNPACKED = 2**26

_OPEN = 2
"""The number of outer levels of the JSON that are written on several lines."""

_OPENED = ("files", "steps", "added_tokens", "special_tokens", "template", "configuration", "loading")


class LockedToken(NamedTuple):
    id: int
    content: str
    flags: str
    """The flags that are set, among special, lstrip, rstrip, normalized, single_word, separated by spaces."""


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of a tokenizer and a template."""

    files: Mapping[str, str]
    """Hex SHA-256 of each file; empty for a tokenizer in memory."""
    steps: Mapping[str, Any]
    """Normalizer, pre-tokenizer, post-processor and decoder, as in `tokenizer.json`, and the model's settings."""
    vocabulary: tuple[str, ...]
    """A digest of the token strings of each block of `BLOCK` ids."""
    merges: tuple[str, ...]
    added_tokens: tuple[LockedToken, ...]
    special_tokens: Mapping[str, str]
    """Tokens by their names in the configuration, such as eos_token."""
    eos_ids: tuple[int, ...]
    template: tuple[str, ...]
    template_sha256: str
    """Hex SHA-256 of the template and its variant for tools."""
    configuration: Mapping[str, Any] | None = None
    """The results of `model_configuration` and `max_length`, and the tokenizer's truncation and padding. None for a
    tokenizer in memory."""
    merge_list: str | None = None
    """The compressed merges, see `packed_merges`; None if they can't be packed."""
    loading: model_files.Settings | None = None
    """Settings that transformers reads from other files, see `loading_settings`, and digests of named templates. None
    for a tokenizer in memory."""


@dataclass(frozen=True, slots=True)
class Lock:
    """The content of a lockfile: the tokenization of a model."""

    model: str
    versions: Mapping[str, str]
    template_kwargs: Mapping[str, Any]
    components: Components
    certificate: Mapping[str, Any]
    """The findings in the model's certificate, see `certified`."""
    goldens: tuple[LockGolden, ...]
    date: str
    certifier: str
    """Hex SHA-256 of the source that made the certificate."""

    def to_text(self) -> str:
        """Return the lockfile's text. Equal locks have equal texts."""
        fields = {"format": FORMAT, **asdict(self), "goldens": [golden.written() for golden in self.goldens]}
        return _laid_out(fields) + "\n"


def make_lock(
    folder: str | Path, *, chat_template: str | Path | None = None, template_kwargs: Mapping[str, Any] | None = None
) -> Lock:
    """Make the lock of a model folder: its parts, the findings of its certificate and the golden ids.

    Raises `TokenizerUnusable` and `TemplateRefused` as `Renderer.load` and `certify` do.
    """
    folder, kwargs = Path(folder), dict(template_kwargs or {})
    renderer = Renderer.load(folder, chat_template)
    return Lock(
        model=folder.resolve().name,
        versions=versions(),
        template_kwargs=kwargs,
        components=components_of(renderer, folder),
        certificate=certified(load_or_certify(renderer, kwargs)),
        goldens=goldens_of(renderer, kwargs),
        date=grammar.DATE,
        certifier=certifier_digest(),
    )


def certified(certificate: Certificate) -> dict[str, Any]:
    answers = {True: "comes back", False: "does not come back", None: "not written"}
    continuations = {
        f"continuation {continuation.name}": f"{continuation.strategy}, append-only: {continuation.append_only}"
        for continuation in certificate.continuations
    }
    return {
        **continuations,
        **{f"parsing {check.name}": answers[check.holds] for check in certificate.parsing},
        "call style": certificate.call_style or "none",
        "reasoning": list(certificate.reasoning or ()),
        "reasoning opened by prompt": certificate.reasoning_opened_by_prompt,
        "generation prompt": certificate.generation_prompt,
        "stop tokens": list(certificate.stop_tokens),
        "date printed": certificate.date_dependent,
        "left out": list(certificate.dropped),
        "injection-safe": certificate.injection_safe,
        "overrides": certificate.overrides or "none",
    }


def versions() -> dict[str, str]:
    installed = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def read_lock(path: str | Path) -> Lock:
    """Read a lockfile. Raises `OSError`, and `InvalidRequest` if it is not a lockfile or has an unknown format."""
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest(f"{path} is not a lockfile: it is not JSON ({error})") from None
    file_format = document.get("format") if isinstance(document, dict) else None
    if file_format != FORMAT:
        raise InvalidRequest(
            f"{path} has lockfile format {file_format}, but this version of tokentape reads format {FORMAT}. Check it "
            "with the version that wrote it, or write a new lockfile with `tokentape lock`, which shows only later "
            "changes"
            if isinstance(file_format, int)
            else f"{path} is not a lockfile: it has no `format`. Write one with `tokentape lock MODEL -o {path.name}`"
        )
    try:
        lock = msgspec.convert(document, Lock)
        # A field that is not written back is unknown: misspelled, or from a different version.
        if json.loads(lock.to_text()) != document:
            raise ValueError("it has unknown or missing fields; write it again with `tokentape lock`")
        if set(lock.components.steps) != set(_STEPS):
            raise ValueError(f"its steps are {', '.join(lock.components.steps)}, expected {', '.join(_STEPS)}")
        if not lock.goldens or not lock.certificate:
            raise ValueError("it has no golden inputs or no certificate")
        model_files.require_known_files(lock.components.loading or {})
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidRequest(f"{path} is not a valid lockfile: {type(error).__name__}: {error}") from None
    return lock


def write_lock(lock: Lock, path: str | Path) -> None:
    """Write a lockfile atomically: readers see the old file or the new file."""
    write_durably(Path(path), lock.to_text().encode())


def _laid_out(value: Any, depth: int = 0, key: str = "") -> str:
    """Return JSON with the outer levels on several lines and each inner value on one line."""
    opened = depth < _OPEN or key in _OPENED or (isinstance(value, Mapping) and "ids" in value)
    if not opened or not isinstance(value, Mapping | list | tuple) or not value:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        brackets = "{}"
        inner = [f"{json.dumps(name)}: {_laid_out(part, depth + 1, name)}" for name, part in value.items()]
    else:
        brackets, inner = "[]", [_laid_out(part, depth + 1) for part in value]
    lines = ",\n".join(" " * (depth + 1) + line for line in inner)
    return f"{brackets[0]}\n{lines}\n{' ' * depth}{brackets[1]}"


def components_of(renderer: Renderer, folder: Path) -> Components:
    tokenizer, template = renderer.tokenizer, renderer.template
    files = {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}
    spec = json.loads(files["tokenizer.json"])
    lengths = {name: spec[name] for name in ("truncation", "padding") if spec.get(name) is not None}
    templates = {name: sha256(text) for name, text in model_files.named_templates(folder).items()}
    return Components(
        files={name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        **spec_parts(spec),
        special_tokens=dict(tokenizer.special_tokens),
        eos_ids=tuple(sorted(tokenizer.eos_ids)),
        template=tuple(template.source.splitlines()),
        template_sha256=template.sha256,
        configuration={
            **(model_files.model_configuration(folder) or {}),
            model_files.MAX_LENGTH: model_files.max_length(folder),
            **lengths,
        },
        loading={
            **model_files.loading_settings(folder, spec),
            **({model_files.TEMPLATES: templates} if templates else {}),
        },
    )


def spec_parts(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Components` that describe a `tokenizer.json`, as `tokenizers` saves it."""
    vocab, merges, added = spec["model"]["vocab"], merges_of(spec["model"]), spec.get("added_tokens") or []
    if isinstance(vocab, Mapping):
        # Without these tables the library loads it quickly.
        spec = {**spec, "model": {**spec["model"], "vocab": {}, "merges": []}, "added_tokens": []}
    spec = json.loads(tokenizers.Tokenizer.from_str(json.dumps(spec)).to_str())
    model = {key: value for key, value in spec["model"].items() if key not in ("vocab", "merges")}
    steps = {name: _step(spec[name]) for name in _PIPELINE}
    if steps["decoder"] is not None and steps["decoder"]["type"] == "ByteLevel":
        # Its flags have no effect, and libraries write different values.
        steps["decoder"] = {"type": "ByteLevel"}
    return {
        "steps": {**steps, "model": _step(model)},
        "vocabulary": tuple(_digests(_entries(vocab))),
        "merges": tuple(_digests(map(" ".join, merges))),
        "merge_list": packed_merges(vocab, merges) if isinstance(vocab, Mapping) else None,
        "added_tokens": tuple(
            LockedToken(token["id"], token["content"], " ".join(flag for flag in _FLAGS if token.get(flag)))
            for token in added
        ),
    }


def _step(value: Any) -> Any:
    """Return a tokenizer step as a lock stores it: without offset settings, and with digests of long strings."""
    if isinstance(value, Mapping):
        return {key: _step(part) for key, part in value.items() if key != "trim_offsets"}
    if isinstance(value, list):
        return [_step(part) for part in value]
    return f"sha256:{sha256(value)}" if isinstance(value, str) and len(value) > _LONG else value


def _entries(vocab: Mapping[str, int] | Sequence[Any]) -> Iterator[str]:
    if isinstance(vocab, Mapping):
        by_id = {token_id: piece for piece, token_id in vocab.items()}
        return (by_id.get(token_id, "") for token_id in range(max(by_id, default=-1) + 1))
    return (json.dumps(entry) for entry in vocab)


def _digests(entries: Iterable[str]) -> Iterator[str]:
    for block in batched(entries, BLOCK):
        joined = "\n".join(block)
        # Token strings with line breaks could make different blocks equal when joined.
        yield sha256(joined if joined.count("\n") < len(block) else json.dumps(block))[:12]


def sha256(text: str) -> str:
    """Return the hex SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def packed_merges(vocab: Mapping[str, int], merges: Sequence[Merge]) -> str | None:
    """Return merges compressed to each result's id and its first part's length; None if a result is not a token."""
    ids = [vocab.get("".join(merge)) if len(merge) == 2 else None for merge in merges]
    if None in ids or not ids:
        return None
    steps, cuts = (
        np.diff(np.array(ids, "<i4"), prepend=np.int32(0)),
        np.array([len(first) for first, _ in merges], "<u2"),
    )
    return base64.b64encode(zlib.compress(steps.tobytes() + cuts.tobytes(), 9)).decode()


def unpacked_merges(packed: str, vocab: Mapping[str, int]) -> list[Merge]:
    """Undo `packed_merges`. Raises `ValueError` if the text is corrupt, or made with a different vocabulary."""
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(packed, validate=True), _MOST_UNPACKED)
        many = len(data) // 6
        ids, cuts = np.cumsum(np.frombuffer(data, "<i4", many)), np.frombuffer(data, "<u2", many, many * 4)
        pieces = {number: piece for piece, number in vocab.items()}
        tokens = [pieces[number] for number in ids.tolist()]
    except (zlib.error, KeyError) as error:
        raise ValueError(f"corrupt merges, or merges of a different vocabulary: {error}") from None
    return [(token[:cut], token[cut:]) for token, cut in zip(tokens, cuts.tolist(), strict=True)]
