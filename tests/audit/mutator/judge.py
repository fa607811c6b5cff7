"""Compare an audit and a lock of two folders with the oracle; each wrong result is a complaint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tests.audit.mutator.files import CONFIG, GENERATION, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, Model, write
from tests.audit.mutator.harmless import NOT_AS_LOCKED
from tests.audit.mutator.oracle import Effect, Refused, View, attempt, effects
from tests.audit.mutator.served import ServedView, shown
from tests.audit.mutator.texts import about
from tests.audit.mutator.undo import AREAS, AREAS_OF_KIND, areas_between, exchange
from tests.audit.skew.fake_server import serving
from tokentape.audit._lock import examine, make_lock
from tokentape.audit._skew.auditor import audit
from tokentape.audit._skew.backends import Backend, SkewChat, open_backend
from tokentape.audit._skew.findings import AuditReport, Skew
from tokentape.errors import TokentapeError

Audit: TypeAlias = Callable[[str | Backend, str | Backend], AuditReport]

CLEAN = "called clean"
ALARM = "false alarm"
NOT_UNDONE = "cause does not hold"
SHOWS_NOTHING = "input shows no difference"
NO_INPUT = "no input shown"
CRASH = "audit crashes"
PASSES = "check passes"
CHECK_ALARM = "check alarms"
CHECK_CRASH = "check crashes"

BEFORE_MODEL = {"normalizer", "pre_tokenizer"}
"""What is done to a text before the model: of a server only the effect is known, which either part may have."""
_LOADED = "loaded by "
_BY_TEXT = {"ids", "special ids", "unstable", "text of ids", "rendering"}
_FILES_OF_EFFECT = {
    "ids": {TOKENIZER},
    "special ids": {TOKENIZER},
    "unstable": {TOKENIZER},
    "cut or padded": {TOKENIZER},
    "stop ids": {CONFIG, GENERATION},
    "other ids of config": {CONFIG, GENERATION},
    "rows": {CONFIG, TOKENIZER},
    "special tokens": {TOKENIZER_CONFIG},
    "rendering": {TEMPLATE, TOKENIZER_CONFIG},
}


@dataclass
class Verdict:
    """What was found of one pair of folders."""

    areas: tuple[str, ...]
    """Where the files differ."""
    served: str | None
    """The kind of the server that is audited; None for a folder."""
    effects: list[Effect]
    """The effects that the oracle found."""
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    """Kind, severity and cause of each finding of the audit."""
    skewed: bool | None = None
    """None: the audit refused a folder."""
    checked: bool | None = None
    """Whether `check` passed; None: it refused the folder."""
    complaints: list[str] = field(default_factory=list)
    """Each as `complaint: area: effect`, or `complaint: area` where there is no effect."""

    @property
    def differs(self) -> bool:
        return bool(self.effects)


class Base:
    """A healthy folder, with objects that are built from it once."""

    def __init__(self, model: Model, root: Path) -> None:
        self.model, self.root = model, root
        self.folder = write(model, root / model.name / "healthy")
        self.view = View(model, self.folder)
        self.lock = make_lock(self.folder)
        self.side = _remembering(open_backend(str(self.folder)))
        self.twin: Base | None = None
        """The same model with small tables."""
        self.prefix = ""
        self.last = self.folder
        self._written = 0

    def written(self, model: Model) -> Path:
        """Write a folder like this one with other files."""
        self._written += 1
        folder = self.root / self.model.name / f"{self.prefix}{self._written}"
        return write(model, folder, (self.model, self.folder))

    def warm(self) -> None:
        """Make what every mutant needs, with an audit of the folder against itself."""
        self.view.encode(self.view.texts)
        _ = self.view.auto, self.view.renderings
        assert not audit(self.side, str(self.folder)).skewed


def _remembering(side: Backend) -> Backend:
    """Return the side with its encodings kept: a healthy one gives the same text the same ids."""
    made: dict[tuple[str, bool], list[int]] = {}
    encode = side.encode

    def kept(texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        new = [text for text in dict.fromkeys(texts) if (text, special) not in made]
        made.update(((text, special), ids) for text, ids in zip(new, encode(new, special=special), strict=True))
        return [made[text, special] for text in texts]

    side.encode = kept  # type: ignore[method-assign]
    return side


def judge_mutant(
    base: Base,
    mutant: Model,
    changes: Sequence[Any],
    run: Audit | None = None,
    *,
    check: bool = True,
    flipped: bool = False,
    served: str | None = None,
) -> Verdict:
    """Compare a changed model with its base by the oracle, the audit and, with `check`, the lock.

    With `flipped` the changed model is side A of the audit. `served` is the kind of a server that has it.
    """
    folder = base.last = base.written(mutant)
    view = View(mutant, folder)
    areas = areas_between(base.model, mutant)
    verdict = Verdict(areas, served, effects(base.view, view, about(base.model, mutant, changes)))
    if served and any(effect.what.endswith("refused") for effect in verdict.effects):
        return verdict  # a server does not start with it
    if served:
        verdict.effects = shown(verdict.effects, base.view, view, served)
    with serving(served, ServedView(view, served)) if served else nullcontext() as url:
        report = _audited(base, f"{served}:{url}" if served else str(folder), verdict, run, flipped=flipped)
    if report is not None:
        found = _without_those_of_serving(base, report, served)
        if verdict.differs and not any(finding.severity == "skew" for finding in found):
            verdict.complaints += [f"{CLEAN}: {_area(areas, effect)}: {effect.what}" for effect in verdict.effects]
        for finding in found:
            verdict.complaints += _of_finding(base, view, finding, report, verdict)
    if check:
        _checked(base, folder, verdict)
    if verdict.checked and verdict.differs:
        verdict.complaints += [f"{PASSES}: {_area(areas, effect)}: {effect.what}" for effect in verdict.effects]
    verdict.complaints = list(dict.fromkeys(verdict.complaints))
    return verdict


def judge_harmless(
    base: Base, name: str, rewritten: Model, run: Audit | None = None, *, served: str | None = None
) -> Verdict:
    """Compare a model with an equivalent one that is written differently, in a folder or with a server of it."""
    folder = base.last = base.written(rewritten)
    view = View(rewritten, folder)
    verdict = Verdict(areas_between(base.model, rewritten), served, effects(base.view, view))
    assert not verdict.effects, f"{name} is not harmless: {verdict.effects[0]}"
    with serving(served, ServedView(view, served)) if served else nullcontext() as url:
        report = _audited(base, f"{served}:{url}" if served else str(folder), verdict, run)
    found = _without_those_of_serving(base, report, served) if report is not None else ()
    if report is None or any(finding.severity == "skew" for finding in found):
        verdict.complaints.append(f"{ALARM}: {name}")
    _checked(base, folder, verdict)
    if not verdict.checked and name not in NOT_AS_LOCKED:
        verdict.complaints.append(f"{CHECK_ALARM}: {name}")
    return verdict


def _area(areas: Sequence[str], effect: Effect | None = None) -> str:
    """The areas in words; those that may have this effect, if one is given."""
    files = _FILES_OF_EFFECT.get(effect.what) if effect else None
    able = [area for area in areas if files is None or any(file in files for file, _ in AREAS[area])]
    return "+".join(sorted(able or areas))


def _audited(
    base: Base, other: str, verdict: Verdict, run: Audit | None, *, flipped: bool = False
) -> AuditReport | None:
    sides = (base.side, other)
    try:
        report = (run or audit)(*(reversed(sides) if flipped else sides))
    except TokentapeError:
        return None
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a Rust panic is not an `Exception`
        verdict.complaints.append(f"{CRASH}: {_area(verdict.areas)}: {type(error).__name__}")
        return None
    verdict.skewed = report.skewed
    verdict.findings = [(finding.kind, finding.severity, finding.cause) for finding in report.findings]
    return report


def _without_those_of_serving(base: Base, report: AuditReport, served: str | None) -> Sequence[Skew]:
    """Return findings without those that are true of a server of the unchanged folder, as of a BOS that it adds."""
    chats = [
        finding for finding in report.findings if finding.severity == "skew" and isinstance(finding.example, SkewChat)
    ]
    if served is None or not chats:
        return report.findings
    server = ServedView(base.view, served)
    with serving(served, server) as url:
        unchanged = audit(base.side, f"{served}:{url}").findings
    of_serving = {
        (finding.kind, finding.cause)
        for finding in unchanged
        if isinstance(finding.example, SkewChat)
        and _prompt(base.view, finding.example) != server.prompt(finding.example)
    }
    return [finding for finding in report.findings if (finding.kind, finding.cause) not in of_serving]


def _prompt(view: View, chat: SkewChat) -> list[int]:
    return view.encode([view.render(_plain(chat, parsed=True), list(chat.tools), chat.generate)])[0]


def _checked(base: Base, folder: Path, verdict: Verdict) -> None:
    """Check the folder against the lock of the base."""
    try:
        verdict.checked = examine(base.lock, folder).ok
    except TokentapeError:
        return
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a Rust panic is not an `Exception`
        verdict.complaints.append(f"{CHECK_CRASH}: {_area(verdict.areas)}: {type(error).__name__}")


def _of_finding(base: Base, view: View, finding: Skew, report: AuditReport, verdict: Verdict) -> list[str]:
    """Undo the part that a finding names, and see whether the sides then agree on the input that it shows.

    The part may be exchanged on either side: of two changes, one alone may make A what B is, but not B what A is.
    """
    if finding.severity != "skew":
        return []
    about_it = f"{finding.kind} for {_area(verdict.areas)}"
    if finding.kind == "unknown":
        unstable = any(effect.what == "unstable" for effect in verdict.effects)
        nothing = not unstable and isinstance(finding.example, str) and _same(base.view, view, finding.example)
        return [f"{SHOWS_NOTHING}: {about_it}"] if nothing else []
    blamed = _blamed(finding)
    if verdict.served and blamed & BEFORE_MODEL:
        blamed |= BEFORE_MODEL
    if any(effect.what == "unstable" for effect in verdict.effects):
        # The kinds of false causes are a matter of chance here.
        false = not blamed & set(verdict.areas)
        return [f"{NOT_UNDONE}: a side that disagrees with itself, for {_area(verdict.areas)}"] if false else []
    if finding.example is None:
        complaints = [] if blamed & set(verdict.areas) else [f"{NOT_UNDONE}: {about_it}"]
        if any(effect.what in _BY_TEXT for effect in verdict.effects) and blamed <= {"vocabulary", "added_tokens"}:
            complaints.append(f"{NO_INPUT}: {about_it}")
        return complaints
    loaded = finding.cause.startswith(_LOADED)
    if _same(base.view, view, finding.example, loaded=loaded):
        return [f"{SHOWS_NOTHING}: {about_it}"]
    everything = set[str]().union(*map(_blamed, report.findings))
    tried = [blamed] if len(verdict.areas) == 1 else [blamed, everything]
    for areas in tried:
        for left, right in ((view, base.view), (base.view, view)):
            made = exchange(left.model, right.model, areas)
            if made.docs != left.model.docs:
                exchanged = View(made, base.written(made))
                if _same(right, exchanged, finding.example, loaded=loaded):
                    return []
    return [f"{NOT_UNDONE}: {about_it}"]


def _blamed(finding: Skew) -> set[str]:
    """The areas that a finding names by its kind, and by its words where a template writes a special token."""
    named = {"special_tokens"} if re.search(r"\b(bos|eos|pad)_token is\b", finding.cause) else set()
    if finding.cause.startswith(_LOADED):
        return {"special_tokens", "clean_up", "added_tokens", "tokenizer_config.json"}
    return named | set(AREAS_OF_KIND.get(finding.kind, ()))


def _same(a: View, b: View, example: str | tuple[int, ...] | SkewChat, *, loaded: bool = False) -> bool:
    """Whether two folders do the same with an input, as transformers loads them if the finding is about that."""
    if loaded:
        return bool(_made_by_transformers(a, example) == _made_by_transformers(b, example))
    return all(_made(a, example, way) == _made(b, example, way) for way in (False, True))


def _made(view: View, example: str | tuple[int, ...] | SkewChat, way: bool) -> Any:
    try:
        match example:
            case str():
                ids = view.encode([example], special=way)
                return ids, view.decode(ids, skip=way)
            case tuple():
                return view.decode([example], skip=way), view.auto_text(example)
        tools = list(example.tools)
        text = view.render(_plain(example, parsed=way), tools, example.generate)
        return text, view.encode([text])
    except Refused:
        return "refused"


def _made_by_transformers(view: View, example: str | tuple[int, ...] | SkewChat) -> Any:
    try:
        match example:
            case str():
                return [view.auto_ids(example, special=way) for way in (False, True)]
            case tuple():
                return view.auto_text(example)
        text = view.render(_plain(example, parsed=True), list(example.tools), example.generate)
        return text, view.auto_ids(text, special=False)
    except Refused:
        return "refused"


def _plain(example: SkewChat, *, parsed: bool) -> list[Any]:
    """Messages as transformers takes them, with the arguments of calls as text or as objects."""
    messages = json.loads(json.dumps(example.messages))
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = call["function"].get("arguments")
            if parsed and isinstance(arguments, str):
                call["function"]["arguments"] = attempt(lambda text=arguments: json.loads(text))
    return messages
