"""Make, read and write lockfiles: the tokenization of a model at a time when it was right, as JSON to review.

Each part has a line of its own, so that `git diff` shows which parts a new lock changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from tokentape._durable import write_durably
from tokentape.audit._loading_files import require_known_files
from tokentape.audit._lock.components import STEPS, Components, components_of
from tokentape.audit._lock.goldens import LockGolden, goldens_of
from tokentape.chat import _grammar as grammar
from tokentape.chat._certificate import Certificate
from tokentape.chat._certificate_cache import load_or_certify
from tokentape.chat._renderer import Renderer
from tokentape.errors import InvalidRequest

FORMAT = 1
"""Version of the lockfile. A check reads no other."""

LIBRARIES = ("tokentape", "tokenizers", "jinja2", "transformers")
"""Libraries with versions that are kept, for information."""

_OPEN = 2
"""Levels of the JSON that are written on several lines."""

_OPENED = ("files", "steps", "added_tokens", "special_tokens", "template", "configuration", "loading")
"""Deeper parts that are written on several lines."""


@dataclass(frozen=True, slots=True)
class Lock:
    """A frozen tokenization."""

    model: str
    """Name of the model folder, for people."""
    versions: Mapping[str, str]
    template_kwargs: Mapping[str, Any]
    components: Components
    certificate: Mapping[str, Any]
    """The findings of its certificate, see `certified`."""
    goldens: tuple[LockGolden, ...]
    date: str = grammar.DATE

    def to_text(self) -> str:
        """Return the lockfile, the same bytes for the same lock."""
        fields = {"format": FORMAT, **asdict(self), "goldens": [_written_golden(golden) for golden in self.goldens]}
        for name in ("configuration", "merge_list", "loading"):
            if fields["components"][name] is None:  # as older versions wrote it
                del fields["components"][name]
        return _laid_out(fields) + "\n"


def make_lock(
    folder: str | Path, *, chat_template: str | Path | None = None, template_kwargs: Mapping[str, Any] | None = None
) -> Lock:
    """Freeze a model folder's tokenization: its parts, its certificate and the golden ids.

    Raises `TokenizerUnusable` and `TemplateRefused` as `Renderer.load` and `certify`.
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
    )


def certified(certificate: Certificate) -> dict[str, Any]:
    """Return the findings of a certificate, without examples and versions."""
    answers = {True: "comes back", False: "does not come back", None: "not written"}
    continuations = {
        f"continuation {found.name}": f"{found.strategy}, append-only: {found.append_only}"
        for found in certificate.continuations
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
    """Return the versions of the installed `LIBRARIES`."""
    found = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


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
        lock = msgspec.convert(written, Lock)
        # A field that is not written back is unknown: its name is misspelled, or it is of another version.
        if json.loads(lock.to_text()) != written:
            raise ValueError("it has fields that a lock has not, or lacks some")
        if set(lock.components.steps) != set(STEPS):
            raise ValueError(f"its steps are {', '.join(lock.components.steps)}, expected {', '.join(STEPS)}")
        require_known_files(lock.components.loading or {})
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidRequest(f"{path} is not a whole lockfile: {type(error).__name__}: {error}") from None
    return lock


def write_lock(lock: Lock, path: str | Path) -> None:
    """Write a lockfile. Readers see the old one or the new one."""
    write_durably(Path(path), lock.to_text().encode())


def _written_golden(golden: LockGolden) -> dict[str, Any]:
    ids = None if golden.ids is None else list(golden.ids)
    if golden.messages:
        tools = {"tools": list(golden.tools)} if golden.tools else {}
        return {"name": golden.name, "messages": list(golden.messages), **tools, "ids": ids}
    special = {"special": True} if golden.special else {}
    return {"name": golden.name, "text": golden.text, **special, "ids": ids}


def _laid_out(value: Any, depth: int = 0, key: str = "") -> str:
    """Return JSON with the outer levels on several lines and the inner ones on one."""
    opened = depth < _OPEN or key in _OPENED or (isinstance(value, Mapping) and "ids" in value)
    if not opened or not isinstance(value, Mapping | list | tuple) or not value:
        return json.dumps(value, ensure_ascii=False)
    indent = " " * (depth + 1)
    if isinstance(value, Mapping):
        inner = [f"{indent}{json.dumps(name)}: {_laid_out(part, depth + 1, name)}" for name, part in value.items()]
        return "{\n" + ",\n".join(inner) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(f"{indent}{_laid_out(part, depth + 1)}" for part in value) + "\n" + " " * depth + "]"
