"""The lockfile: how one model's tokenization was, on a day on which it was right. JSON that people can read and review.

A part stands on a line of its own, so that `git diff` shows which part a new lock changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from tokentape.audit.lock.components import STEPS, Components, components_of
from tokentape.audit.lock.goldens import DATE, LockGolden, goldens_of
from tokentape.chat.certificate import Certificate
from tokentape.chat.certificate_cache import load_or_certify
from tokentape.chat.renderer import Renderer
from tokentape.errors import InvalidRequest

FORMAT = 1
"""Version of the lockfile. A check takes no other."""

LIBRARIES = ("tokentape", "tokenizers", "jinja2", "transformers")
"""Whose versions are kept, as information."""

_OPEN = 2
"""How many levels of the JSON are written over several lines."""

_OPENED = ("files", "steps", "added_tokens", "special_tokens", "template")
"""What is written so below that."""


@dataclass(frozen=True, slots=True)
class Lock:
    """What is frozen."""

    model: str
    """Name of the model folder, for people."""
    versions: Mapping[str, str]
    template_kwargs: Mapping[str, Any]
    components: Components
    certificate: Mapping[str, Any]
    """What was certified, see `certified`."""
    goldens: tuple[LockGolden, ...]
    date: str = DATE

    def to_text(self) -> str:
        """The lockfile, the same bytes for the same lock."""
        fields = {
            "format": FORMAT,
            **asdict(self),
            "components": _written_components(self.components),
            "goldens": [_written_golden(golden) for golden in self.goldens],
        }
        return _laid_out(fields) + "\n"


def make_lock(
    folder: str | Path, *, chat_template: str | Path | None = None, template_kwargs: Mapping[str, Any] | None = None
) -> Lock:
    """Freeze a model folder's tokenization: its parts, its certificate and the golden ids.

    Raises `TokenizerUnusable` and `TemplateRefused` as `Renderer.load` and `certify`.
    """
    folder, kwargs = Path(folder), dict(template_kwargs or {})
    renderer = Renderer.load(folder, chat_template)
    source = (folder / "tokenizer.json").read_bytes()
    return Lock(
        model=folder.resolve().name,
        versions=dict(versions(LIBRARIES)),
        template_kwargs=kwargs,
        components=components_of(renderer.tokenizer, source, renderer.template, folder),
        certificate=certified(load_or_certify(renderer, kwargs)),
        goldens=goldens_of(renderer, kwargs),
    )


def certified(certificate: Certificate) -> dict[str, Any]:
    """What of a certificate a lock keeps: all that was found, without the examples, and without versions."""
    answers = {True: "comes back", False: "does not come back", None: "not written"}
    return {
        **{
            f"continuation {found.name}": f"{found.strategy}, append-only: {found.append_only}"
            for found in certificate.continuations
        },
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


def versions(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The installed version of each library that is installed."""
    for name in names:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def read_lock(path: str | Path) -> Lock:
    """Read a lockfile. Raises `InvalidRequest` if it is none, or of another format, and `OSError`."""
    path = Path(path)
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest(f"{path} is not a lockfile: it is not JSON ({error})") from None
    found = written.get("format") if isinstance(written, dict) else None
    if found != FORMAT:
        raise InvalidRequest(
            f"{path} is a lockfile of format {found}, and this version of tokentape reads format {FORMAT}. Check it "
            "with the version that wrote it, or write it anew with `tokentape lock`: a new lock vouches for nothing "
            "that was before it"
            if isinstance(found, int)
            else f"{path} is not a lockfile: it has no `format`. `tokentape lock MODEL -o {path.name}` writes one"
        )
    try:
        parts = written["components"]
        parts = {**parts, "added_tokens": list(map(_read_added, parts["added_tokens"]))}
        lock = msgspec.convert({**written, "components": parts}, Lock)
        # What is not written back was not understood: a name misspelt, or a part of another version.
        if json.loads(lock.to_text()) != written:
            raise ValueError("it has fields that a lock has not, or lacks some")
        if set(lock.components.steps) != set(STEPS):
            raise ValueError(f"its steps are {', '.join(lock.components.steps)}, expected {', '.join(STEPS)}")
    except (msgspec.ValidationError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise InvalidRequest(f"{path} is not a whole lockfile: {type(error).__name__}: {error}") from None
    return lock


def write_lock(lock: Lock, path: str | Path) -> None:
    """Write a lockfile; whoever reads it meanwhile sees the old one or the new one."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(lock.to_text(), encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _written_components(parts: Components) -> dict[str, Any]:
    return {**asdict(parts), "added_tokens": [[one.id, one.content, one.flags] for one in parts.added_tokens]}


def _read_added(written: Any) -> dict[str, Any]:
    token_id, content, flags = written
    return {"id": token_id, "content": content, "flags": flags}


def _written_golden(golden: LockGolden) -> dict[str, Any]:
    ids = None if golden.ids is None else list(golden.ids)
    if golden.messages:
        tools = {"tools": list(golden.tools)} if golden.tools else {}
        return {"name": golden.name, "messages": list(golden.messages), **tools, "ids": ids}
    special = {"special": True} if golden.special else {}
    return {"name": golden.name, "text": golden.text, **special, "ids": ids}


def _laid_out(value: Any, depth: int = 0, key: str = "") -> str:
    """JSON with the outer levels open and the inner ones on one line."""
    opened = depth < _OPEN or key in _OPENED or (isinstance(value, Mapping) and "ids" in value)
    if not opened or not isinstance(value, Mapping | list | tuple) or not value:
        return json.dumps(value, ensure_ascii=False)
    indent = " " * (depth + 1)
    if isinstance(value, Mapping):
        inner = [f"{indent}{json.dumps(name)}: {_laid_out(part, depth + 1, name)}" for name, part in value.items()]
        return "{\n" + ",\n".join(inner) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(f"{indent}{_laid_out(part, depth + 1)}" for part in value) + "\n" + " " * depth + "]"
