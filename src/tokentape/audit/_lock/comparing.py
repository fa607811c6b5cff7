"""Compare observations with a lock: which part changed, which input shows it, the ids expected and found, the cause."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokentape.audit._loading_files import TEMPLATES, settings_apart, write_settings
from tokentape.audit._lock.components import BLOCK, Components, LockedToken
from tokentape.audit._lock.goldens import LockGolden
from tokentape.audit._lock.lockfile import Lock
from tokentape.audit._lock.merge_list import merges_apart, unpacked_merges
from tokentape.audit._lock.observing import Observed
from tokentape.audit._model_config import SAMPLED
from tokentape.audit._skew.report_text import first_difference
from tokentape.errors import TokenizerUnusable

_SHOWN = 5
_SHOWN_OF_CERTIFICATE = 2
_SHOWN_IDS = 8
_LINE = 200

CAUSES = {
    "normalizer": "the normalizer was dropped or replaced when the tokenizer was loaded or converted: accents, Hangul, "
    "ligatures and wide characters get other ids",
    "pre_tokenizer": "another loader class built the pre-tokenizer anew instead of reading tokenizer.json, as "
    "transformers 5 does for some classes, or another revision corrected its pattern",
    "post_processor": "add_bos_token or add_eos_token differs, or another loader class set the special tokens",
    "decoder": "another loader class or conversion; text made from ids differs, and so does what is parsed from it",
    "model": "settings of the model differ: ignore_merges, byte_fallback, dropout, the unknown token",
    "vocabulary": "another model's tokenizer, or pieces were replaced in place",
    "merges": "another model's tokenizer, or a conversion that reordered merges",
    "added tokens": "training code added tokens or set their flags (add_tokens, add_special_tokens), or it is another "
    "revision of the tokenizer",
    "special tokens": "the configuration names other tokens, or training code set pad_token or eos_token",
    "end-of-sequence ids": "generation_config.json or eos_token differs: turns end elsewhere",
    "configuration": "config.json or generation_config.json is of other weights, or training code wrote it anew; or "
    "code saved a tokenizer with truncation or padding switched on",
    "loading": "tokenizer_config.json, special_tokens_map.json or added_tokens.json is of another revision, or was "
    "edited: code that loads the folder by transformers gets another tokenizer",
    "template": "the template was edited, replaced by a training template, or is another revision",
    "template kwargs": "the kwargs that conversations are rendered with are not those of the lock",
}
"""The usual cause of a change, by part."""


@dataclass(frozen=True, slots=True)
class LockChange:
    what: str
    """A part, by the names of `CAUSES`, `certificate`, or `golden ids`."""
    found: str
    """The difference, in words."""
    cause: str = ""
    golden: LockGolden | None = None
    """The first input of its kind with other ids."""
    ids: tuple[int, ...] | None = None
    """Its ids now; None if the template refuses it."""
    at: int = 0
    """Position of the first id that differs."""


@dataclass(frozen=True, slots=True)
class LockReport:
    """The result of a check. Changes fail it, notes don't."""

    compared: str
    """What was compared with the lock."""
    inputs: int
    """The number of golden inputs that were compared."""
    changes: tuple[LockChange, ...]
    notes: tuple[str, ...]
    not_compared: tuple[str, ...] = ()
    """What the check says nothing of, and why."""

    @property
    def ok(self) -> bool:
        """True if nothing changed."""
        return not self.changes

    def __str__(self) -> str:
        """Return a line for each change, followed by the input that shows it."""
        if self.ok:
            lines = [f"{self.compared} is as locked: {self.inputs} golden inputs have their ids"]
        else:
            lines = [f"{self.compared} is not as locked: {', '.join(dict.fromkeys(c.what for c in self.changes))}"]
        for change in self.changes:
            lines += change_lines(change)
        return "\n".join([*lines, *(f"note: {note}" for note in all_notes(self))])


def compare(lock: Lock, observed: Observed, template_kwargs: Mapping[str, Any], *, strict: bool = False) -> LockReport:
    """Compare what was observed with a lock. `strict` makes a changed library version, or file, a change."""
    changes = list(_changed_parts(lock, observed, template_kwargs))
    notes: list[str] = []
    left = list(observed.not_compared)
    if lock.components.configuration is None:
        left.append("config.json, truncation and padding, which this older lock does not hold")
    if lock.components.loading is None:
        left.append("files that transformers reads beside tokenizer.json, which this older lock lacks")
    elif observed.components is not None and observed.components.loading is not None:
        found, note = _loading(lock.components, observed.components, Path(observed.name))
        changes += found
        notes += note
    moved = list(_versions(lock, observed))
    notices = [*moved, *(_files(lock, observed) if not changes else ())]
    changes += _certificate(lock, observed, moved)
    changes += _goldens(lock, observed, [change.what for change in changes], moved)
    if strict:
        changes += [LockChange("versions and files", notice, "`--strict` takes no other") for notice in notices]
    else:
        notes += notices
    return LockReport(observed.name, len(observed.ids), tuple(changes), tuple(notes), tuple(left))


def all_notes(report: LockReport) -> list[str]:
    """Return what was not compared, then the other notes, in words."""
    return [*(f"not compared: {what}" for what in report.not_compared), *report.notes]


def _changed_parts(lock: Lock, observed: Observed, template_kwargs: Mapping[str, Any]) -> Iterator[LockChange]:
    if dict(template_kwargs) != dict(lock.template_kwargs):
        was, now = (json.dumps(kwargs, ensure_ascii=False) for kwargs in (lock.template_kwargs, dict(template_kwargs)))
        yield _named("template kwargs", f"were {was}, are {now}")
    if observed.components is None:
        return
    old, new = lock.components, observed.components
    for name, step in old.steps.items():
        if new.steps[name] != step:
            yield _named(name, _step_change(step, new.steps[name]))
    if new.vocabulary != old.vocabulary:
        yield _named("vocabulary", _block_change("id", old.vocabulary, new.vocabulary))
    if new.merges != old.merges:
        named = _merges_apart(lock.components, observed)
        yield _named("merges", named or _block_change("merge", old.merges, new.merges))
    tokens = [{token.id: token for token in each.added_tokens} for each in (old, new)]
    changes = [_token_change(i, tokens[0].get(i), tokens[1].get(i)) for i in sorted(tokens[0] | tokens[1])]
    if any(changes):
        yield _named("added tokens", _first_few(list(filter(None, changes)), _SHOWN))
    for key in sorted({*old.special_tokens, *new.special_tokens}):
        was, now = (repr(one) if one else "none" for one in (old.special_tokens.get(key), new.special_tokens.get(key)))
        if was != now:
            yield _named("special tokens", f"{key} was {was}, is {now}")
    if new.eos_ids != old.eos_ids:
        yield _named("end-of-sequence ids", f"were {list(old.eos_ids)}, are {list(new.eos_ids)}")
    if old.configuration is not None and new.configuration is not None:
        for key in sorted({*old.configuration, *new.configuration}):
            before, after = old.configuration.get(key), new.configuration.get(key)
            if before != after and (old.loading is not None or not key.endswith(SAMPLED)):  # older locks lack these
                yield _named("configuration", f"{key} was {_short(before)}, is {_short(after)}")
    if new.template_sha256 != old.template_sha256:
        yield _named("template", _template_change(old.template, new.template))


def _loading(old: Components, new: Components, folder: Path) -> tuple[list[LockChange], list[str]]:
    """Return changes of the files beside tokenizer.json, or notes if transformers makes the same tokenizer of them."""
    was, now = dict(old.loading or {}), dict(new.loading or {})
    templates = [each.pop(TEMPLATES, {}) for each in (was, now)]
    changes = [
        _named("template", f"the one named {name} {_came(before, after, 'is another text')}")
        for name in sorted({*templates[0], *templates[1]})
        for before, after in [[each.get(name) for each in templates]]
        if before != after
    ]
    if was == now:
        return changes, []
    from tokentape.audit._skew.auditor import loaded_findings

    said = settings_apart(was, now, "{} was {}, is {}")
    with TemporaryDirectory() as locked:
        try:
            write_settings(was, old.special_tokens, Path(locked), folder)
            found, note = loaded_findings(Path(locked), folder, said)
        except TokenizerUnusable as error:
            return [*changes, _named("loading", f"{said}; {error}")], []
    return [*changes, *(_named("loading", one.cause) for one in found)], [note] if note else []


def _came(was: object, now: object, changed: str) -> str:
    return "is new" if was is None else "is gone" if now is None else changed


def _first_few(found: Sequence[str], most: int) -> str:
    return "; ".join(found[:most]) + (f"; and {len(found) - most} more" if len(found) > most else "")


def _named(what: str, found: str) -> LockChange:
    return LockChange(what, found, CAUSES[what])


def _step_change(was: Any, now: Any) -> str:
    if was is None or now is None:
        return f"was {_kind(was)}, is {_kind(now)}"
    path, one, other = _first_difference(was, now, "")
    return f"{_kind(was)}{path}: was {_short(one)}, is {_short(other)}"


def _first_difference(one: Any, other: Any, path: str) -> tuple[str, Any, Any]:
    """Return the path of the first difference of two nested values, and the values there."""
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.get("type") == other.get("type"):
        for key in (*one, *(key for key in other if key not in one)):
            if one.get(key) != other.get(key):
                return _first_difference(one.get(key), other.get(key), f"{path}.{key}")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for at, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                return _first_difference(a, b, f"{path}[{at}]")
    return path, one, other


def _kind(step: Any) -> str:
    if step is None:
        return "none"
    return str(step.get("type") or "settings") if isinstance(step, Mapping) else _short(step)


def _block_change(what: str, was: Sequence[str], now: Sequence[str]) -> str:
    at = first_difference(was, now)
    changed = sum(a != b for a, b in zip_longest(was, now))
    return (
        f"{changed} of {max(len(was), len(now))} blocks of {BLOCK} {what}s differ, the first from {what} "
        f"{at * BLOCK} to {(at + 1) * BLOCK - 1}"
    )


def _merges_apart(old: Components, observed: Observed) -> str:
    """Return which merges changed; empty if that can't be known."""
    new = observed.components
    if not (old.merge_list and new and new.merge_list and observed.source and old.vocabulary == new.vocabulary):
        return ""
    vocab = json.loads(observed.source())["model"]["vocab"]
    try:
        return merges_apart(unpacked_merges(old.merge_list, vocab), unpacked_merges(new.merge_list, vocab))
    except ValueError:
        return ""


def _token_change(token_id: int, was: LockedToken | None, now: LockedToken | None) -> str:
    """Return how a token changed; empty if it did not."""
    if was is None or now is None:
        return f"{token_id} {was.content!r} is gone" if was else f"{token_id} {now.content!r} is new" if now else ""
    if was.content != now.content:
        return f"{token_id} was {was.content!r}, is {now.content!r}"
    before, after = was.flags.split(), now.flags.split()
    flags = [f"no longer {flag}" for flag in before if flag not in after]
    flags += [f"now {flag}" for flag in after if flag not in before]
    return f"{token_id} {now.content!r} is {' and '.join(flags)}" if flags else ""


def _template_change(was: Sequence[str], now: Sequence[str]) -> str:
    at = first_difference(was, now)
    one, other = ([line.strip() for line in lines[at : at + 1]] for lines in (was, now))
    if one and other:
        return f"line {at + 1} was {_short(one[0])}, is {_short(other[0])}"
    if one or other:
        return f"line {at + 1} is {'new' if other else 'gone'}: {_short((one or other)[0])}"
    return "its variant for tools, or an ending new line, is another"


def _certificate(lock: Lock, observed: Observed, moved: Sequence[str]) -> Iterator[LockChange]:
    if observed.certificate is None:
        return
    found = [
        f"{key}: was {_short(was)}, is {_short(observed.certificate.get(key))}"
        for key, was in lock.certificate.items()
        if observed.certificate.get(key) != was
    ]
    if found:
        cause = "follows from the changes above" if not moved else f"follows from the changes above, or {moved[0]}"
        yield LockChange("certificate", _first_few(found, _SHOWN_OF_CERTIFICATE), cause)


def _goldens(lock: Lock, observed: Observed, changed: Sequence[str], moved: Sequence[str]) -> Iterator[LockChange]:
    """Yield the first text and the first conversation with other ids, and how many more there are."""
    for chat, kind in ((False, "texts"), (True, "conversations")):
        asked = [golden for golden in lock.goldens if bool(golden.messages) == chat and golden.name in observed.ids]
        differ = [golden for golden in asked if observed.ids[golden.name] != golden.ids]
        if not differ:
            continue
        first, *others = differ
        ids = observed.ids[first.name]
        names = [golden.name.removeprefix("conversation: ") for golden in others[:_SHOWN]]
        more = f", and {len(others)} more: {', '.join(names)}{', …' if len(others) > _SHOWN else ''}" if others else ""
        found = f"of {first.name!r} ({len(differ)} of {len(asked)} {kind} differ{more})"
        cause = _golden_cause(first, ids, changed, moved)
        yield LockChange("golden ids", found, cause, first, ids, first_difference(first.ids or (), ids or ()))


def _golden_cause(golden: LockGolden, ids: tuple[int, ...] | None, changed: Sequence[str], moved: Sequence[str]) -> str:
    expected = golden.ids
    if expected is None:
        return "the template took it over: it refused this conversation before"
    if ids is None:
        return "the template refuses this conversation now"
    bos = expected[:1]
    if ids == (*bos, *expected):
        return "a beginning-of-sequence token twice: the template writes one, and the tokenizer adds another"
    if ids == expected[1:]:
        return "the beginning-of-sequence token is missing"
    parts = [part for part in changed if part != "certificate"]
    if parts:
        return f"follows from what changed above: {', '.join(dict.fromkeys(parts))}"
    if moved:
        return f"no part changed, so the library does: {'; '.join(moved)}"
    return "no part that was looked at changed: what loads or serves the tokenizer treats it differently"


def _versions(lock: Lock, observed: Observed) -> Iterator[str]:
    for name, was in lock.versions.items():
        now = observed.versions.get(name)
        if now is not None and now != was:
            yield f"{name} was {was}, is {now}"


def _files(lock: Lock, observed: Observed) -> Iterator[str]:
    if observed.components is None or not observed.components.files:
        return
    was, now = lock.components.files, observed.components.files
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            came = _came(was.get(name), now.get(name), "has other bytes")
            yield f"{name} {came}, but nothing in it that was looked at changed"


def change_lines(change: LockChange) -> Iterator[str]:
    """Yield a change in words, its input and ids, and the cause."""
    yield f"  {change.what}: {change.found}"
    yield from (f"    {name:<10}{said}" for name, said in shown_input(change))
    if change.cause:
        yield f"    {'likely cause' if change.golden is not None else 'usually'}: {change.cause}"


def shown_input(change: LockChange) -> Iterator[tuple[str, str]]:
    """Yield the input that shows a change, the ids expected and those found, each with its name."""
    golden = change.golden
    if golden is not None:
        if not golden.messages:
            yield "text", _short(golden.text)
        yield "expected", _around(golden.ids, change.at)
        yield "found", _around(change.ids, change.at)


def _around(ids: Sequence[int] | None, at: int) -> str:
    if ids is None:
        return "refused by the template"
    start = max(at - 2, 0)
    window = list(ids[start : start + _SHOWN_IDS])
    before, after = "… " if start else "", " …" if start + _SHOWN_IDS < len(ids) else ""
    return f"{before}{window}{after} (from token {at} of {len(ids)})"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if len(text) <= _LINE else f"{text[:_LINE]}…"
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) else text
