"""Compare observations with a lock, and report each change with its cause and the first input whose ids differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from tokentape._alignment import anchors, first_difference
from tokentape.audit import _model_files as model_files
from tokentape.audit._lock.lockfile import BLOCK, Components, Lock, LockedToken, LockGolden, sha256, unpacked_merges
from tokentape.audit._report import Block, CiCase, CiFinding, Facts, Heading, Paragraph, Report
from tokentape.audit._skew.file_findings import same_template
from tokentape.audit._skew.merge_tables import Merge, same_merges
from tokentape.audit._skew.parts import PREFIXES, nested_difference, same_settings, same_step
from tokentape.chat._certificate_cache import certifier_digest
from tokentape.errors import TokenizerUnusable

_SHOWN, _SHOWN_MERGES, _SHOWN_OF_CERTIFICATE, _SHOWN_IDS = 5, 3, 2, 8
_LINE = 200

_CAUSES = {
    "normalizer": "the normalizer was dropped or replaced when the tokenizer was loaded or converted: accents, Hangul, "
    "ligatures and wide characters get different ids",
    "pre_tokenizer": "a different loader class built its own pre-tokenizer instead of reading tokenizer.json, as "
    "transformers 5 does for some classes, or a different revision corrected its pattern",
    "post_processor": "add_bos_token or add_eos_token differs, or a different loader class set the special tokens",
    "decoder": "a different loader class or conversion; decoded text differs, and so do replies parsed from it",
    "model": "the model's settings differ: ignore_merges, byte_fallback, dropout, the unknown token",
    "vocabulary": "a different model's tokenizer, or token strings were replaced in place",
    "merges": "a different model's tokenizer, or a conversion that reordered merges",
    "added tokens": "training code added tokens or set their flags (add_tokens, add_special_tokens), or the tokenizer "
    "has a different revision",
    "special tokens": "the configuration names different tokens, or training code set pad_token or eos_token",
    "end-of-sequence ids": "generation_config.json or eos_token differs: turns end at different tokens",
    "configuration": "config.json or generation_config.json is from different weights, or training code rewrote it; "
    "or code saved a tokenizer with truncation or padding enabled, or with a different model_max_length",
    "loading": "tokenizer_config.json, special_tokens_map.json or added_tokens.json is from a different revision, or "
    "was edited: code that loads the folder with transformers gets a different tokenizer",
    "template": "the template was edited, replaced by a training template, or has a different revision",
    "template kwargs": "conversations are rendered with different kwargs than the lock's",
}

RULES = {
    **{part: f"the {part} changed" for part in _CAUSES},
    "certificate": "a finding in the certificate changed",
    "golden ids": "the ids of an input changed",
    "versions and files": "a library's version or a file's bytes changed",
}


@dataclass(frozen=True, slots=True)
class Observed:
    """Observations to compare with a lock."""

    name: str
    ids: Mapping[str, tuple[int, ...] | None]
    """The ids of each golden input that could be encoded, by name; None if the template refuses it."""
    versions: Mapping[str, str]
    components: Components | None = None
    certificate: Mapping[str, Any] | None = None
    source: Callable[[], str | bytes] | None = None
    not_compared: Sequence[str] = ()
    """What could not be observed, each entry with the reason."""


@dataclass(frozen=True, slots=True)
class LockChange:
    """A change to a part, or to the ids of golden inputs. `what` is a key of `RULES`."""

    what: str
    found: str
    cause: str = ""
    golden: LockGolden | None = None
    ids: tuple[int, ...] | None = None
    """The current ids of `golden`; None if the template refuses it."""
    at: int = 0

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of label and text: the input that shows the change, the expected and found ids, the cause."""
        if self.golden is not None:
            if not self.golden.messages:
                yield "text", _short(self.golden.text)
            yield "expected", _around(self.golden.ids, self.at)
            yield "found", _around(self.ids, self.at)
        if self.cause:
            yield "usual cause" if self.golden is None else "likely cause", self.cause

    def lines(self) -> list[str]:
        return [f"  {self.what}: {self.found}", *(f"    {name + ':':<9} {value}" for name, value in self.rows())]


@dataclass(frozen=True, slots=True)
class LockReport:
    """The result of a check, which fails if there are changes; notes don't make it fail."""

    compared: str
    inputs: int
    changes: tuple[LockChange, ...]
    notes: tuple[str, ...]
    not_compared: tuple[str, ...] = ()
    """What the check could not compare, each entry with the reason."""

    @property
    def ok(self) -> bool:
        """True if nothing changed."""
        return not self.changes

    @property
    def all_notes(self) -> list[str]:
        """All notes, starting with what was not compared."""
        return [*(f"not compared: {what}" for what in self.not_compared), *self.notes]

    def __str__(self) -> str:
        """Return a line for each change, followed by the input that shows it."""
        verdict = f"as locked: {self.inputs} golden inputs have their ids"
        if not self.ok:
            verdict = f"not as locked: {', '.join(dict.fromkeys(change.what for change in self.changes))}"
        changes = [line for change in self.changes for line in change.lines()]
        return "\n".join([f"{self.compared} is {verdict}", *changes, *(f"note: {note}" for note in self.all_notes)])


def lock_layout(lockfile: str, reports: Sequence[LockReport]) -> Report:
    blocks: list[Block] = []
    for report in reports:
        verdict: tuple[str, Literal["ok", "fail"]] = ("as locked", "ok") if report.ok else ("not as locked", "fail")
        blocks.append(Heading(report.compared, 2, *verdict))
        blocks.append(Paragraph(f"Compared {report.inputs} golden inputs.", "dim"))
        for change in report.changes:
            blocks += [Heading(change.what, 3, style="fail"), Facts([("changed", change.found), *change.rows()])]
        blocks += map(Paragraph, report.all_notes)
    return Report(f"Check of {lockfile}", blocks)


def lock_cases(report: LockReport) -> list[CiCase]:
    """Return a case with the changes, and a skipped case for each thing that was not compared, for CI systems."""
    findings = [CiFinding(change.what, "error", change.what, "\n".join(change.lines())) for change in report.changes]
    skipped = [CiCase(f"{report.compared}: {why.partition(':')[0]}", skipped=why) for why in report.not_compared]
    return [CiCase(report.compared, findings, str(report).splitlines()[0]), *skipped]


def compare(lock: Lock, observed: Observed, template_kwargs: Mapping[str, Any], *, strict: bool = False) -> LockReport:
    """Compare observations with a lock. With `strict`, changed library versions and files fail, else they are notes."""
    old, new = lock.components, observed.components
    changes = [_change(what, description) for what, description in _changed_parts(lock, observed, template_kwargs)]
    notes: list[str] = []
    parts_differ = bool(changes)
    if new is not None and new.loading is not None:
        loading_changes, note = _loading(old, new, Path(observed.name))
        changes += loading_changes
        notes += note
        parts_differ = bool(changes or note)
    now = {name: observed.versions.get(name, was) for name, was in lock.versions.items()}
    moved = [
        f"{name} was {pair[0]}, is {pair[1]}" for name, pair in model_files.changed_entries(lock.versions, now).items()
    ]
    notices = [*moved, *(_files(old, new) if new is not None and not changes else ())]
    certified = _certificate(lock, observed)
    if certified and not parts_differ and lock.certifier != certifier_digest():
        notices.append(f"a different version of the certifier made the certificate in the lock: {certified}")
    elif certified:
        causes = ["the changes above"] * bool(changes) + moved[:1]
        changes.append(LockChange("certificate", certified, ", or ".join(causes)))
    changes += _goldens(lock, observed, [change.what for change in changes], moved)
    if strict:
        changes += [LockChange("versions and files", notice, "`--strict` forbids it") for notice in notices]
    else:
        notes += notices
    not_compared = [*observed.not_compared]
    in_model_config = [key for key in old.configuration or () if key.startswith(f"{model_files.MODEL_CONFIG} ")]
    if in_model_config and model_files.MODEL_CONFIG not in (old.loading or {}):
        not_compared.append("the tokenizer class that config.json names: the locked config.json names none")
    return LockReport(observed.name, len(observed.ids), tuple(changes), tuple(notes), tuple(not_compared))


def _changed_parts(lock: Lock, observed: Observed, template_kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if dict(template_kwargs) != dict(lock.template_kwargs):
        was, now = (json.dumps(kwargs, ensure_ascii=False) for kwargs in (lock.template_kwargs, dict(template_kwargs)))
        yield "template kwargs", f"were {was}, are {now}"
    old, new = lock.components, observed.components
    if new is None:
        return
    for name, step in old.steps.items():
        same = _same_settings(old, observed) if name == "model" else same_step(name, step, new.steps[name])
        if not same:
            yield name, _step_change(step, new.steps[name])
    if new.vocabulary != old.vocabulary:
        yield "vocabulary", _block_change("id", old.vocabulary, new.vocabulary)
    if new.merges != old.merges and (apart := _merges_apart(old, observed)) is not None:
        yield "merges", apart or _block_change("merge", old.merges, new.merges)
    tokens = [{token.id: token for token in components.added_tokens} for components in (old, new)]
    changes = [_token_change(i, tokens[0].get(i), tokens[1].get(i)) for i in sorted(tokens[0] | tokens[1])]
    if any(changes):
        yield "added tokens", _first_few(list(filter(None, changes)), _SHOWN)
    for key, pair in model_files.changed_entries(old.special_tokens, new.special_tokens).items():
        before, after = (repr(value) if value else "none" for value in pair)
        yield "special tokens", f"{key} was {before}, is {after}"
    if new.eos_ids != old.eos_ids:
        yield "end-of-sequence ids", f"were {list(old.eos_ids)}, are {list(new.eos_ids)}"
    if new.configuration is not None:
        for key, pair in model_files.changed_entries(old.configuration or {}, new.configuration).items():
            yield "configuration", f"{key} was {_short(pair[0])}, is {_short(pair[1])}"
    if new.template_sha256 != old.template_sha256 and not _same_template(old, new):
        yield "template", _template_change(old.template, new.template)


def _loading(old: Components, new: Components, folder: Path) -> tuple[list[LockChange], list[str]]:
    """Return changes from files other than tokenizer.json, and a note if changed settings have no effect."""
    was, now = model_files.comparable_settings(old.loading or {}, new.loading or {})
    templates = model_files.changed_entries(was.pop(model_files.TEMPLATES, {}), now.pop(model_files.TEMPLATES, {}))
    changes = [_change("template", f"the template named {name} {_came(*pair)}") for name, pair in templates.items()]
    if was == now:
        return changes, []
    from tokentape.audit._skew.auditor import loaded_findings

    difference = model_files.settings_apart(was, now, "{} was {}, is {}")
    with TemporaryDirectory() as locked:
        try:
            model_files.write_settings(was, old.special_tokens, Path(locked), folder)
            findings, note = loaded_findings(Path(locked), folder, difference)
        except TokenizerUnusable as error:
            return [*changes, _change("loading", f"{difference}; {error}")], []
    return [*changes, *(_change("loading", finding.cause) for finding in findings)], [note] if note else []


def _came(was: object, now: object, otherwise: str = "has different text") -> str:
    return "is new" if was is None else "is gone" if now is None else otherwise


def _first_few(items: Sequence[str], most: int) -> str:
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")


def _change(what: str, description: str) -> LockChange:
    return LockChange(what, description, _CAUSES[what])


def _step_change(was: Any, now: Any) -> str:
    if was is None or now is None:
        return f"was {_kind(was)}, is {_kind(now)}"
    path, old, new = nested_difference(was, now)
    return f"{_kind(was)}{path}: was {_short(old)}, is {_short(new)}"


def _kind(step: Any) -> str:
    if step is None:
        return "none"
    return str(step.get("type") or "settings") if isinstance(step, Mapping) else _short(step)


def _block_change(what: str, was: Sequence[str], now: Sequence[str]) -> str:
    block = first_difference(was, now)
    changed = sum(a != b for a, b in zip_longest(was, now))
    return (
        f"{changed} of {max(len(was), len(now))} blocks of {BLOCK} {what}s differ, the first from {what} "
        f"{block * BLOCK} to {(block + 1) * BLOCK - 1}"
    )


def _same_settings(old: Components, observed: Observed) -> bool:
    """Return True if the model's settings are equal, or provably have the same effect with equal tables."""
    new = observed.components
    if new is None or new.steps["model"] == old.steps["model"]:
        return True
    if observed.source is None or (new.vocabulary, new.merges) != (old.vocabulary, old.merges):
        return False
    now = json.loads(observed.source())
    model = {**now["model"], **old.steps["model"]}
    return same_settings({**now, "pre_tokenizer": old.steps["pre_tokenizer"], "model": model}, now)


def _merges_apart(old: Components, observed: Observed) -> str | None:
    """Describe which merges changed. Return an empty string if that is unknown, None if it provably has no effect."""
    new = observed.components
    if not (old.merge_list and new and new.merge_list and observed.source and old.vocabulary == new.vocabulary):
        return ""
    vocab = json.loads(observed.source())["model"]["vocab"]
    try:
        was, now = (unpacked_merges(packed, vocab) for packed in (old.merge_list, new.merge_list))
        plain = not any(components.steps["model"].get(prefix) for components in (old, new) for prefix in PREFIXES)
        return None if plain and same_merges(was, now) else merges_apart(was, now)
    except ValueError:
        return ""


def merges_apart(was: Sequence[Merge], now: Sequence[Merge]) -> str:
    """Describe which merges are gone, new and moved, with as few as possible moved."""
    in_place, before, after = {was[index] for index, _ in anchors(was, now)}, set(was), set(now)
    changes = {
        "gone": [merge for merge in was if merge not in after],
        "new": [merge for merge in now if merge not in before],
        "moved": [merge for merge in now if merge in before and merge not in in_place],
    }
    parts = []
    for how, merges in changes.items():
        shown = [repr(" ".join(merge)) for merge in merges[:_SHOWN_MERGES]]
        more = ["..."] if len(merges) > _SHOWN_MERGES else []
        parts += [f"{len(merges)} {how}: {', '.join([*shown, *more])}"] if merges else []
    return "; ".join(parts)


def _token_change(token_id: int, was: LockedToken | None, now: LockedToken | None) -> str:
    """Describe how a token changed. Return an empty string if it did not."""
    if was is None or now is None:
        token = was or now
        return f"{token_id} {token.content!r} {_came(was, now)}" if token else ""
    if was.content != now.content:
        return f"{token_id} was {was.content!r}, is {now.content!r}"
    before, after = was.flags.split(), now.flags.split()
    flags = [f"no longer {flag}" for flag in before if flag not in after]
    flags += [f"now {flag}" for flag in after if flag not in before]
    return f"{token_id} {now.content!r} is {' and '.join(flags)}" if flags else ""


def _same_template(old: Components, new: Components) -> bool:
    """Return True if two templates provably write the same text. Without variants for tools, their lines show them."""
    texts = ["\n".join(components.template) for components in (old, new)]
    whole = [
        components.template_sha256 in (sha256(f"{text}\0"), sha256(f"{text}\n\0"))
        for components, text in zip((old, new), texts, strict=True)
    ]
    return all(whole) and same_template(*texts)


def _template_change(was: Sequence[str], now: Sequence[str]) -> str:
    index = first_difference(was, now)
    old, new = ([line.strip() for line in lines[index : index + 1]] for lines in (was, now))
    if old and new:
        return f"line {index + 1} was {_short(old[0])}, is {_short(new[0])}"
    if old or new:
        return f"line {index + 1} is {'new' if new else 'gone'}: {_short((old or new)[0])}"
    return "its variant for tools, or the new line at its end, differs"


def _certificate(lock: Lock, observed: Observed) -> str:
    """Describe how the certificate changed. Return an empty string if it did not, or was not observed."""
    if observed.certificate is None:
        return ""
    now = {key: observed.certificate.get(key) for key in lock.certificate}
    changes = [
        f"{key}: was {_short(a)}, is {_short(b)}"
        for key, (a, b) in model_files.changed_entries(lock.certificate, now).items()
    ]
    return _first_few(changes, _SHOWN_OF_CERTIFICATE)


def _goldens(lock: Lock, observed: Observed, changed: Sequence[str], moved: Sequence[str]) -> Iterator[LockChange]:
    for chat, kind in ((False, "texts"), (True, "conversations")):
        compared = [golden for golden in lock.goldens if bool(golden.messages) == chat and golden.name in observed.ids]
        differ = [golden for golden in compared if observed.ids[golden.name] != golden.ids]
        if not differ:
            continue
        first, *others = differ
        ids = observed.ids[first.name]
        names = [golden.name.removeprefix("conversation: ") for golden in others[:_SHOWN]]
        more = f", and {len(others)} more: {', '.join(names)}{', …' if len(others) > _SHOWN else ''}" if others else ""
        description = f"of {first.name!r} ({len(differ)} of {len(compared)} {kind} differ{more})"
        cause = _golden_cause(first, ids, changed, moved)
        yield LockChange("golden ids", description, cause, first, ids, first_difference(first.ids or (), ids or ()))


def _golden_cause(golden: LockGolden, ids: tuple[int, ...] | None, changed: Sequence[str], moved: Sequence[str]) -> str:
    expected = golden.ids
    if expected is None:
        return "the template now accepts this conversation, which it refused before"
    if ids is None:
        return "the template now refuses this conversation"
    if ids == (*expected[:1], *expected):
        return "two beginning-of-sequence tokens: the template writes one, and the tokenizer adds one"
    if ids == expected[1:]:
        return "the beginning-of-sequence token is missing"
    parts = [part for part in changed if part != "certificate"]
    if parts:
        return f"the changes above: {', '.join(dict.fromkeys(parts))}"
    if moved:
        return f"no part changed, so a library's version makes the difference: {'; '.join(moved)}"
    return "no compared part changed: the code that loads or serves the tokenizer treats it differently"


def _files(old: Components, new: Components) -> Iterator[str]:
    for name, pair in model_files.changed_entries(old.files, new.files).items() if new.files else ():
        looked = "but nothing that was compared in it has another effect"
        if name == model_files.PROCESSOR_TEMPLATE:
            looked = "which transformers processors read: it was not compared"
        yield f"{name} {_came(*pair, 'has different bytes')}, {looked}"


def _around(ids: Sequence[int] | None, position: int) -> str:
    if ids is None:
        return "refused by the template"
    start = max(position - 2, 0)
    window = list(ids[start : start + _SHOWN_IDS])
    before, after = "… " if start else "", " …" if start + _SHOWN_IDS < len(ids) else ""
    return f"{before}{window}{after} (from token {position} of {len(ids)})"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if len(text) <= _LINE else f"{text[:_LINE]}…"
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) else text
