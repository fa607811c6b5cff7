"""Find out if two backends map the same texts and messages to the same ids, and explain any difference."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from tokentape.audit._model_files import (
    CONFIG_FILES,
    OTHER_FILES,
    PROCESSOR_FILES,
    comparable_settings,
    settings_apart,
)
from tokentape.audit._skew import battery, text_probes
from tokentape.audit._skew.backends import Ability, Backend, BackendOptions, SkewChat, open_backend
from tokentape.audit._skew.causes import TextCauses
from tokentape.audit._skew.chat_probes import chat_findings, echo_findings
from tokentape.audit._skew.corpus import compare_corpus, conversations_of, corpus_files
from tokentape.audit._skew.file_findings import configuration_findings, file_findings, file_notes
from tokentape.audit._skew.findings import AuditReport, CorpusStatistics, Probe, Skew
from tokentape.audit._skew.parts import unlike_tokens
from tokentape.errors import TokenizerUnusable

CompareCorpus: TypeAlias = Callable[
    [Backend, Backend, Sequence[Path], int | None, Callable[[str], None]],
    tuple[CorpusStatistics, list[text_probes.Differing]],
]

_SAME_SETTINGS = "Use the tokenizer files that the weights were trained with on both sides, not tokenizer.json alone."


def audit(
    a: str | Path | Backend,
    b: str | Path | Backend,
    *,
    corpus: Sequence[str | Path] = (),
    options_a: BackendOptions | None = None,
    options_b: BackendOptions | None = None,
    workers: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    compare: CompareCorpus = compare_corpus,
) -> AuditReport:
    """Compare two backends, and explain what differs.

    Args:
        a: the name of a backend to open, see `open_backend`, or an open `Backend`, which stays open. Usually the
            training side.
        b: the backend to compare with, by name or open. Usually the serving side.
        corpus: files or folders of text or JSON lines to encode in addition to the battery.
        options_a: template, template kwargs and date for backend A, if it is passed by name.
        options_b: the same options for backend B.
        workers: processes that encode the corpus; by default one per core.
        progress: called with a description of each step.
        compare: the function that compares the corpus. Pass your own to use more machines.

    Raises:
        InvalidRequest: no file or folder has that name, or the corpus has no text.
        TokenizerUnusable: a backend can't be read.
        EngineError: a server does not answer.

    Example:
        >>> audit("models/train", "models/serve").skewed              # doctest: +SKIP
        False

    """
    began = time.monotonic()
    with ExitStack() as opened:
        backends = []
        for side, options in ((a, options_a), (b, options_b)):
            if isinstance(side, str | Path):
                progress(f"opening {side}")
                side = open_backend(str(side), options)
                opened.callback(side.close)
            backends.append(side)
        run, files = _Run(backends[0], backends[1], progress), [Path(path) for path in corpus]
        stable = run.stability()
        if stable:
            run.texts()
            run.decoding()
            run.conversations(list(conversations_of(corpus_files(files))) if files else ())
        run.findings += file_findings(run.a, run.b, run.causes, run.findings)
        run.loading()
        run.findings += configuration_findings(run.a.facts, run.b.facts)
        run.notes += file_notes(run.a.facts, run.b.facts, run.findings)
        statistics = run.corpus(files, workers, compare) if files and stable else None
        return AuditReport(
            a=run.a.facts,
            b=run.b.facts,
            findings=tuple(sorted(run.findings, key=lambda finding: finding.severity == "caution")),
            tried=run.tried,
            skipped=run.skipped,
            notes=tuple(run.notes),
            seconds=time.monotonic() - began,
            corpus=statistics,
            uncovered=tuple(run.uncovered()),
        )


def loaded_findings(
    a: Path, b: Path, difference: str, progress: Callable[[str], None] = lambda _: None
) -> tuple[list[Skew], str]:
    """Load two folders with transformers. Return findings or a note, which quote `difference`, found in their files."""
    from tokentape.audit._skew.backends.auto import AutoBackend, same_tokenizer, unlike_sides

    progress("loading both folders with transformers")
    ours, theirs = (AutoBackend(str(folder), str(folder), BackendOptions()) for folder in (a, b))
    run = _Run(ours, theirs, progress)
    by = f"transformers {run.a.facts.versions['transformers']}"
    if sides := "; ".join(unlike_sides(ours, theirs)):
        cause = f"{sides}: ids differ if padding or truncation is enabled"
        run.findings.append(Skew("truncation", "facts", cause, _SAME_SETTINGS, 1))
    elif same_tokenizer(ours, theirs):
        return [], f"{difference}: {by} loads the same tokenizer from both"
    run.texts()
    run.decoding()
    run.findings += file_findings(run.a, run.b, run.causes, run.findings, templates=False)
    findings = [replace(x, cause=f"loaded by {by}, {x.cause} ({difference})", fix=_SAME_SETTINGS) for x in run.findings]
    return (
        findings,
        "" if findings else f"{difference}: the tokenizers that {by} loads agree on everything that was tried",
    )


class _Run:
    """The state of a running audit: both backends, the findings so far, what was tried and what was skipped."""

    def __init__(self, a: Backend, b: Backend, progress: Callable[[str], None]) -> None:
        self.a, self.b, self.progress = a, b, progress
        self.findings: list[Skew] = []
        self.tried: dict[Probe, int] = {}
        self.skipped: dict[Probe, str] = {}
        self.notes: list[str] = []
        self.causes = TextCauses(a, b)
        self.known: tuple[dict[str, list[int]], dict[str, list[int]]] = {}, {}
        """Both sides' ids of battery texts, which servers are not asked for again."""
        self.longest = 0
        self.most = 0, 0
        """The largest numbers of messages and of tools in a conversation that was rendered."""
        self.own = 0, 0
        """The number of the user's conversations that were rendered, and that were rendered differently."""

    def stability(self) -> bool:
        """Encode the battery twice with each side. Add a finding and return False if a side's ids change."""
        texts = [text for text in battery.by_text(battery.texts()) if len(text) > 1]
        sides = zip("AB", (self.a, self.b), self.known, strict=True)
        unstable = [text_probes.unstable_finding(side, letter, texts, known_ids) for letter, side, known_ids in sides]
        self.findings += filter(None, unstable)
        if any(unstable):
            self.skipped["encode"] = "texts and conversations: a side disagrees with itself"
        return not any(unstable)

    def texts(self) -> None:
        """Probe plain texts, control tokens, BOS and EOS."""
        self.progress("encoding the battery")
        groups: dict[str, Sequence[str]] = {
            **battery.texts(),
            **battery.part_texts(self.a, self.b, self.causes.differing),
        }
        added = dict.fromkeys([*self.a.facts.added, *self.b.facts.added])
        if self._able("controls", "encode", "control tokens within text"):
            groups["control tokens"] = tuple(battery.control_token_texts(added))
            if self.a.facts.spec is not None and self.b.facts.spec is not None:
                changed = unlike_tokens(self.a.facts, self.b.facts).values()
                groups["changed tokens"] = [text for tokens in changed for text in battery.token_texts(tokens[0])]
        else:
            spelled = re.compile("|".join(map(re.escape, added)) or "(?!)")
            groups = {name: [text for text in some if not spelled.search(text)] for name, some in groups.items()}
        lines = {"competing merges": groups.pop("competing merges", ())}
        if self.a.is_server or self.b.is_server:
            lines["vocabulary"] = groups.pop("vocabulary")
        texts = battery.by_text(groups)
        self.tried["encode"] = len(texts) + sum(map(len, lines.values()))
        self.longest = max(map(len, texts))
        differing = text_probes.compare_texts(self.a, self.b, texts, known=self.known)
        for group, some in lines.items():
            differing += text_probes.compare_in_blocks(self.a, self.b, some, group)
        self._add(*text_probes.explain_texts(self.a, self.b, self.causes, differing, "encode", self.progress))
        if not self._able("special", "special", "BOS and EOS"):
            return
        plain = text_probes.special_texts(self.a, self.b)
        unlike = {difference.text for difference in text_probes.compare_texts(self.a, self.b, plain, known=self.known)}
        agreed = {text: group for text, group in plain.items() if text not in unlike}
        self.tried["special"] = len(agreed)
        differing = text_probes.compare_texts(self.a, self.b, agreed, special=True)
        self._add(*text_probes.explain_texts(self.a, self.b, self.causes, differing, "special", special=True))

    def decoding(self) -> None:
        if not self._able("decode", "decode", "decoding"):
            return
        self.progress("decoding")
        texts = battery.by_text(battery.texts())
        if {"controls"} <= self.a.facts.abilities & self.b.facts.abilities:
            texts |= dict.fromkeys({**self.a.facts.added, **self.b.facts.added}, "control tokens")
        listed = list(texts)
        ids = (
            text_probes.encoded(side, listed, known_ids)
            for side, known_ids in zip((self.a, self.b), self.known, strict=True)
        )
        rows = zip(listed, *ids, strict=True)
        sequences = {tuple(ids_a): texts[text] for text, ids_a, ids_b in rows if ids_a == ids_b and ids_a}
        if not (self.a.is_server or self.b.is_server):
            alone = range(min(self.a.facts.vocab_size or 0, self.b.facts.vocab_size or 0))
            sequences |= {
                (token_id,): "vocabulary" for token_id in alone if self.a.token(token_id) == self.b.token(token_id)
            }
        self.tried["decode"] = len(sequences)
        self.findings += text_probes.decode_findings(self.a, self.b, sequences)

    def conversations(self, own: Sequence[SkewChat]) -> None:
        """Compare renderings and loss masks of built-in and the user's `own` conversations, and servers' prompts."""
        if self._able("render", "render", "rendering"):
            self.progress("rendering conversations")
            result = chat_findings(self.a, self.b, self.causes, self.progress, own)
            self._add(result.findings, result.left)
            self.own = result.counts["own"], result.counts["own differing"]
            self.most = result.counts["messages"], result.counts["tools"]
            self.tried["render"] = result.counts["render"]
            if result.counts["masks"]:
                self.tried["masks"] = result.counts["masks"]
        for letter, backend in (("A", self.a), ("B", self.b)):
            if backend.echoes:
                tried, new = echo_findings(backend, letter)
                self.tried["echo"] = self.tried.get("echo", 0) + tried
                self.findings += new

    def corpus(self, paths: Sequence[Path], workers: int | None, compare: CompareCorpus) -> CorpusStatistics:
        statistics, differing = compare(self.a, self.b, paths, workers, self.progress)
        self.tried["corpus"] = statistics.documents
        if statistics.differing > len(differing):
            more = statistics.differing - len(differing)
            self.notes.append(f"{more} more documents differ; only {len(differing)} were kept for explanation")
        self._add(*text_probes.explain_texts(self.a, self.b, self.causes, differing, "corpus", self.progress))
        return replace(statistics, conversations=self.own[0], differing_conversations=self.own[1])

    def loading(self) -> None:
        """If files besides tokenizer.json differ, load both folders with transformers and compare."""
        if self.a.facts.loading is None or self.b.facts.loading is None:
            return
        ours, theirs = comparable_settings(self.a.facts.loading, self.b.facts.loading)
        if ours == theirs:
            return
        difference = settings_apart(ours, theirs)
        a, b = (Path((side.reopened_as or "").removeprefix("json:")) for side in (self.a, self.b))
        try:
            findings, note = loaded_findings(a, b, difference, self.progress)
        except TokenizerUnusable as error:
            findings, note = [Skew("unknown", "facts", f"{difference}, and {error}", _SAME_SETTINGS, 1)], ""
        causes = {finding.cause for finding in self.findings}
        self.findings += [finding for finding in findings if not any(cause in finding.cause for cause in causes)]
        self.notes += [note] if note else []

    def uncovered(self) -> Iterator[str]:
        a, b = self.a.facts, self.b.facts
        yield "images, audio and other content parts"
        yield "template kwargs other than those passed"
        yield "streams, sampling, and an engine's length limits"
        yield f"texts longer than {self.longest:,} characters"
        if self.tried.get("render"):
            yield f"conversations of more than {self.most[0]} messages or {self.most[1]} tools"
        for letter, side in (("A", a), ("B", b)):
            if side.spec is None and not (a.tables and b.tables):
                yield f"the tokenizer's parts in {letter}, {side.kind}: only its outputs were compared"
            elif side.loading and None in (a.loading, b.loading):
                yield f"what transformers loads from the other files in {letter}: to compare it, pass auto:PATH"
        if refused := sorted({*self.a.refused} & {*self.b.refused}, key=len):
            yield f"{len(refused)} texts that both sides refuse, the shortest of {len(refused[0])} characters"
        for name in PROCESSOR_FILES:
            if a.files.get(name) != b.files.get(name):
                yield f"{name}, which differs: transformers processors read it, tokenizers do not"
        for name in OTHER_FILES:
            if a.files and b.files and a.files.get(name) != b.files.get(name):
                yield f"{name}, which differs: libraries or versions that read it may get other ids"
        if lacking := [letter for letter, side in (("A", a), ("B", b)) if side.configuration is None]:
            files = " and ".join(CONFIG_FILES)
            yield f"stop ids and embedding rows: {' and '.join(lacking)} has no {files}, or does not show them"
        if not (a.spec or a.tables or b.spec or b.tables):
            yield "the vocabulary: neither side lists its tokens"
        if not self.tried.get("masks"):
            yield "loss masks: no template marks the tokens that carry loss"

    def _add(self, findings: Sequence[Skew], unexplained: int) -> None:
        """Add findings. If an earlier finding has the same kind and cause, add to its count instead."""
        for new in findings:
            for index, old in enumerate(self.findings):
                if (old.kind, old.cause) == (new.kind, new.cause):
                    where = tuple(dict.fromkeys((*old.where, *new.where)))
                    self.findings[index] = replace(old, count=old.count + new.count, where=where)
                    break
            else:
                self.findings.append(new)
        if unexplained:
            self.notes.append(
                f"{unexplained} more inputs differ and were not explained: fix the findings, then audit again"
            )

    def _able(self, ability: Ability, probe: Probe, what: str) -> bool:
        lacking = [letter for letter, side in (("A", self.a), ("B", self.b)) if ability not in side.facts.abilities]
        if lacking:
            reason = f"{what}: not supported by {' and '.join(lacking)}"
            self.skipped[probe] = f"{self.skipped[probe]}; {reason}" if probe in self.skipped else reason
        return not lacking
