"""The skew auditor: whether two sides map the same texts and messages to the same ids, and if not, why.

report = audit("models/train", "vllm:http://127.0.0.1:8000")
for finding in report.findings:
    print(finding.kind, finding.count, finding.cause, finding.example)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from tokentape.audit.skew import battery
from tokentape.audit.skew.causes import TextCauses
from tokentape.audit.skew.chat_probes import chat_findings, echo_findings
from tokentape.audit.skew.corpus import compare_corpus
from tokentape.audit.skew.fact_probes import fact_findings, fact_notes
from tokentape.audit.skew.findings import AuditReport, CorpusStatistics, Probe, Skew
from tokentape.audit.skew.sides.base import Ability, Side
from tokentape.audit.skew.sides.from_spec import SideOptions
from tokentape.audit.skew.sides.opening import open_side
from tokentape.audit.skew.text_probes import Differing, compare_texts, decode_findings, explain_texts, special_texts

CompareCorpus: TypeAlias = Callable[
    [Side, Side, Sequence[Path], int | None, Callable[[str], None]], tuple[CorpusStatistics, list[Differing]]
]
"""A function like `compare_corpus`."""


def _silent(_: str) -> None:
    pass


def audit(
    a: str | Path | Side,
    b: str | Path | Side,
    *,
    corpus: Sequence[str | Path] = (),
    options_a: SideOptions | None = None,
    options_b: SideOptions | None = None,
    workers: int | None = None,
    progress: Callable[[str], None] = _silent,
    compare: CompareCorpus = compare_corpus,
) -> AuditReport:
    """Compare two sides, and explain what differs.

    Args:
        a: what `open_side` takes, or a `Side` of your own, which is left open. Usually the training side.
        b: the same. Usually the serving side.
        corpus: files or folders of text or JSON lines to encode besides the battery.
        options_a: template, template kwargs and date of side A, if it is opened here.
        options_b: the same for side B.
        workers: processes that encode the corpus; by default one per core.
        progress: told what is being done.
        compare: compares the corpus, for somebody who has more machines than this one.

    Raises:
        InvalidRequest: a name says nothing that there is, or the corpus has no text.
        TokenizerUnusable: a side can't be read.
        EngineError: a server does not answer.

    Example:
        >>> audit("models/train", "models/serve").skewed              # doctest: +SKIP
        False

    """
    began = time.monotonic()
    with ExitStack() as opened:
        sides = []
        for given, options in ((a, options_a), (b, options_b)):
            if isinstance(given, str | Path):
                progress(f"opening {given}")
                side = open_side(str(given), options)
                opened.callback(side.close)
            else:
                side = given
            sides.append(side)
        run = _Run(sides[0], sides[1], progress)
        run.texts()
        run.decoding()
        run.facts()
        run.conversations()
        statistics = run.corpus([Path(path) for path in corpus], workers, compare) if corpus else None
        order = {"skew": 0, "caution": 1}
        return AuditReport(
            a=run.a.facts,
            b=run.b.facts,
            findings=tuple(sorted(run.findings, key=lambda one: order[one.severity])),
            tried=run.tried,
            skipped=run.skipped,
            notes=tuple(run.notes),
            seconds=time.monotonic() - began,
            corpus=statistics,
        )


@dataclass(slots=True)
class _Run:
    """One audit while it runs."""

    a: Side
    b: Side
    progress: Callable[[str], None]
    findings: list[Skew] = field(default_factory=list)
    tried: dict[Probe, int] = field(default_factory=dict)
    skipped: dict[Probe, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    causes: TextCauses = field(init=False)

    def __post_init__(self) -> None:
        self.causes = TextCauses(self.a, self.b)

    def texts(self) -> None:
        """Plain texts, control tokens, BOS and EOS."""
        self.progress("encoding the battery")
        groups: dict[str, Sequence[str]] = dict(battery.texts())
        if self._able("controls", "encode", "control tokens within text"):
            tokens = dict.fromkeys([*self.a.facts.added, *self.b.facts.added])
            groups["control tokens"] = tuple(battery.control_token_texts(tokens))
        else:
            spelled = {*self.a.facts.added, *self.b.facts.added}
            groups = {name: [t for t in texts if not any(s in t for s in spelled)] for name, texts in groups.items()}
        texts = battery.by_text(groups)
        self.tried["encode"] = len(texts)
        differing = compare_texts(self.a, self.b, texts)
        self._explained(*explain_texts(self.a, self.b, self.causes, differing, "encode", self.progress))
        if not self._able("special", "special", "BOS and EOS"):
            return
        plain = special_texts(self.a, self.b)
        unlike = {one.text for one in compare_texts(self.a, self.b, plain)}
        agreed = {text: group for text, group in plain.items() if text not in unlike}
        self.tried["special"] = len(agreed)
        differing = compare_texts(self.a, self.b, agreed, special=True)
        self._explained(*explain_texts(self.a, self.b, self.causes, differing, "special", special=True))

    def decoding(self) -> None:
        """Ids back to text: those of the battery on which both sides agree."""
        if not self._able("decode", "decode", "decoding"):
            return
        self.progress("decoding")
        texts = battery.by_text(battery.texts())
        asked = list(texts)
        both = zip(asked, self.a.encode(asked), self.b.encode(asked), strict=True)
        sequences = {tuple(one): texts[text] for text, one, other in both if one == other and one}
        self.tried["decode"] = len(sequences)
        self.findings += decode_findings(self.a, self.b, sequences)

    def facts(self) -> None:
        """What the sides say of themselves, where no probe has shown it yet."""
        self.findings += fact_findings(self.a.facts, self.b.facts, self.findings)
        self.notes += fact_notes(self.a.facts, self.b.facts, self.findings)

    def conversations(self) -> None:
        """Renderings, their loss masks, and the prompts that servers say they used."""
        if self._able("render", "render", "rendering"):
            self.progress("rendering conversations")
            found = chat_findings(self.a, self.b, self.causes, self.progress)
            self._explained(found.findings, found.left)
            self.tried["render"] = found.tried
            if found.masks:
                self.tried["masks"] = found.masks
        for letter, side in (("A", self.a), ("B", self.b)):
            echoed = echo_findings(side, letter)
            if echoed is not None:
                self.tried["echo"] = self.tried.get("echo", 0) + echoed.tried
                self.findings += echoed.findings

    def corpus(self, paths: Sequence[Path], workers: int | None, compare: CompareCorpus) -> CorpusStatistics:
        """The user's own texts, explained by what is known already where that is enough."""
        statistics, differing = compare(self.a, self.b, paths, workers, self.progress)
        self.tried["corpus"] = statistics.documents
        before = len(differing)
        findings, left = explain_texts(self.a, self.b, self.causes, differing, "corpus", self.progress)
        if statistics.differing > before:
            self.notes.append(
                f"{statistics.differing - before} more documents differ: only {before} were kept to explain"
            )
        self._explained(findings, left)
        return statistics

    def _explained(self, findings: Sequence[Skew], left: int) -> None:
        """Add findings, one with the same cause as an earlier one to its count."""
        for new in findings:
            for at, old in enumerate(self.findings):
                if (old.kind, old.cause) == (new.kind, new.cause):
                    where = tuple(dict.fromkeys((*old.where, *new.where)))
                    self.findings[at] = replace(old, count=old.count + new.count, where=where)
                    break
            else:
                self.findings.append(new)
        if left:
            self.notes.append(f"{left} more inputs differ and were not explained: mend what is found, and audit again")

    def _able(self, ability: Ability, probe: Probe, what: str) -> bool:
        lacking = [one for one, side in (("A", self.a), ("B", self.b)) if ability not in side.facts.abilities]
        if lacking:
            reason = f"{what}: not to be had of {' and '.join(lacking)}"
            self.skipped[probe] = f"{self.skipped[probe]}; {reason}" if probe in self.skipped else reason
        return not lacking
