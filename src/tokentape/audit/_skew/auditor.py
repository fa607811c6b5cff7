"""Find out if two backends map the same texts and messages to the same ids, and explain any difference."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from tokentape.audit._skew import battery
from tokentape.audit._skew.backends import Ability, Backend, BackendOptions, SkewChat, open_backend
from tokentape.audit._skew.backends import spec as spec_backend
from tokentape.audit._skew.causes import LOAD_THE_FILE, SAME_FILES, TextCauses
from tokentape.audit._skew.chat_probes import ChatProbe
from tokentape.audit._skew.corpus import compare_corpus, conversations_of, corpus_files
from tokentape.audit._skew.file_findings import configuration_findings, file_findings, file_notes
from tokentape.audit._skew.findings import AuditReport, CorpusStatistics, Differing, Kind, Probe, Skew
from tokentape.audit._skew.parts import brief, differing_tokens, part_of
from tokentape.audit._skew.probing import explain, result, smallest
from tokentape.errors import TokenizerUnusable

CompareCorpus: TypeAlias = Callable[
    [Backend, Backend, Sequence[Path], int | None, Callable[[str], None]],
    tuple[CorpusStatistics, list[Differing]],
]

_BLOCKS = (200, 20, 1)
_MOST_BLOCKS = 20
"""The maximum number of differing blocks of one size that are searched further."""

_NO_CLEAN_UP = (
    "Set clean_up_tokenization_spaces to false, and record ids: text that was cleaned up encodes differently."
)
_CLEAN_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")

_SAME_SETTINGS = "Use the tokenizer files that the weights were trained with on both sides, not tokenizer.json alone."


def audit(
    a: str | Path | Backend,
    b: str | Path | Backend,
    *,
    corpus: str | Path | Sequence[str | Path] = (),
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
        corpus: a file or folder, or a list of them, of text or JSON lines to encode in addition to the battery.
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
                try:
                    side = open_backend(str(side), options)
                except TokenizerUnusable as error:
                    if str(side) in str(error):
                        raise
                    raise TokenizerUnusable(f"{side}: {error}") from error
                opened.callback(side.close)
            backends.append(side)
        run = _Run(backends[0], backends[1], progress)
        files = [Path(path) for path in ([corpus] if isinstance(corpus, str | Path) else corpus)]
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
    progress("loading both folders with transformers")
    ours, theirs = (spec_backend.AutoBackend(str(folder), str(folder), BackendOptions()) for folder in (a, b))
    run = _Run(ours, theirs, progress)
    by = f"transformers {run.a.facts.versions['transformers']}"
    if sides := "; ".join(spec_backend.differing_sides(ours, theirs)):
        cause = f"{sides}: ids differ if padding or truncation is enabled"
        run.findings.append(Skew("truncation", "facts", cause, _SAME_SETTINGS, 1))
    elif spec_backend.same_tokenizer(ours, theirs):
        return [], f"{difference}: {by} loads the same tokenizer from both"
    run.texts()
    run.decoding()
    run.findings += file_findings(run.a, run.b, run.causes, run.findings, templates=False)
    if not run.findings:
        return [], f"{difference}: the tokenizers that {by} loads agree on everything that was tried"
    return [
        replace(finding, cause=f"loaded by {by}, {finding.cause} ({difference})", fix=_SAME_SETTINGS)
        for finding in run.findings
    ], ""


class _Run:
    """The state of a running audit: both backends, the findings so far, what was tried and what was skipped."""

    def __init__(self, a: Backend, b: Backend, progress: Callable[[str], None]) -> None:
        self.a, self.b, self.progress = a, b, progress
        self.findings: list[Skew] = []
        self.tried: dict[Probe, int] = {}
        self.skipped: dict[Probe, str] = {}
        self.notes: list[str] = []
        self.causes = TextCauses(a, b)
        self.longest = 0
        self.most = 0, 0
        """The largest numbers of messages and of tools in a conversation that was rendered."""
        self.own = 0, 0
        """The number of the user's conversations that were rendered, and that were rendered differently."""

    def stability(self) -> bool:
        """Encode the battery repeatedly with each side. Add a finding and return False if its ids can change."""
        texts = [text for text in battery.by_text(battery.texts()) if len(text) > 1]
        unstable = (_unstable_finding(side, letter, texts) for letter, side in (("A", self.a), ("B", self.b)))
        self.findings += filter(None, unstable)
        if self.findings:
            self.skipped["encode"] = "texts and conversations: a side disagrees with itself"
        return not self.findings

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
                changed = differing_tokens(self.a.facts, self.b.facts).values()
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
        differing = self._compared(texts)
        for group, some in lines.items():
            differing += self._compared_in_blocks(some, group)
        self._add(*self.causes.explain(differing, "encode", self.progress))
        if not self._able("special", "special", "BOS and EOS"):
            return
        special_tokens = [side.facts.special_tokens for side in (self.a, self.b)]
        ends = [tokens[name] for tokens in special_tokens for name in ("bos_token", "eos_token") if tokens.get(name)]
        plain = dict.fromkeys(
            ["a", "a b", "", "\n", *(text for end in ends for text in (f"{end}a", f"a{end}"))], "BOS and EOS"
        )
        different = {difference.text for difference in self._compared(plain)}
        agreed = {text: group for text, group in plain.items() if text not in different}
        self.tried["special"] = len(agreed)
        differing = self._compared(agreed, special=True)
        self._add(*self.causes.explain(differing, "special", special=True))

    def _compared(self, texts: Mapping[str, str], *, special: bool = False) -> list[Differing]:
        """Return the texts whose ids differ. `texts` maps each text to its group."""
        listed = list(texts)
        a, b = (side.encode(listed, special=special) for side in (self.a, self.b))
        rows = zip(texts.items(), a, b, strict=True)
        return [Differing(text, group, a_ids, b_ids) for (text, group), a_ids, b_ids in rows if a_ids != b_ids]

    def _compared_in_blocks(self, texts: Sequence[str], where: str) -> list[Differing]:
        """Return texts whose ids differ, with few requests: encode blocks of lines, and split blocks that differ."""
        differences: list[Differing] = []
        groups = [texts[start : start + _BLOCKS[0]] for start in range(0, len(texts), _BLOCKS[0])]
        for size in (*_BLOCKS[1:], 0):
            blocks = {"\n".join(group): group for group in groups}
            differing = self._compared(dict.fromkeys(blocks, where))[:_MOST_BLOCKS]
            if not size:
                return differences + differing
            groups = []
            for block in differing:
                lines = blocks[block.text]
                smaller = [lines[start : start + size] for start in range(0, len(lines), size)]
                if self._compared(dict.fromkeys(map("\n".join, smaller), where)):
                    groups += smaller
                else:
                    differences.append(block)
        return differences

    def decoding(self) -> None:
        if not self._able("decode", "decode", "decoding"):
            return
        self.progress("decoding")
        texts = battery.by_text(battery.texts())
        added, unspelled = {**self.a.facts.added, **self.b.facts.added}, set[int]()
        if "controls" in self.a.facts.abilities & self.b.facts.abilities:
            texts |= dict.fromkeys(added, "control tokens")
        else:  # sentencepiece and mistral-common decode control tokens to no text
            unspelled = {token.id for side in (self.a, self.b) for token in side.facts.added.values()}
        listed = list(texts)
        rows = zip(listed, self.a.encode(listed), self.b.encode(listed), strict=True)
        sequences = {tuple(ids_a): texts[text] for text, ids_a, ids_b in rows if ids_a == ids_b and ids_a}
        if not (self.a.is_server or self.b.is_server):
            alone = range(min(self.a.facts.vocab_size or 0, self.b.facts.vocab_size or 0))
            sequences |= {
                (token_id,): "vocabulary"
                for token_id in alone
                if token_id not in unspelled and self.a.token(token_id) == self.b.token(token_id)
            }
        self.tried["decode"] = len(sequences)
        self.findings += _decode_findings(self.a, self.b, sequences)

    def conversations(self, own: Sequence[SkewChat]) -> None:
        """Compare renderings and loss masks of built-in and the user's `own` conversations, and servers' prompts."""
        probe = ChatProbe(self.a, self.b, self.causes)
        if self._able("render", "render", "rendering"):
            self.progress("rendering conversations")
            probe.compare(self.progress, own)
        probe.compare_echoes()
        self._add(probe.findings, probe.left)
        self.own = probe.counts["own"], probe.counts["own differing"]
        self.most = probe.counts["messages"], probe.counts["tools"]
        probes: tuple[Probe, ...] = ("render", "masks", "echo")
        self.tried |= {name: probe.counts[name] for name in probes if name in probe.counts}

    def corpus(self, paths: Sequence[Path], workers: int | None, compare: CompareCorpus) -> CorpusStatistics:
        statistics, differing = compare(self.a, self.b, paths, workers, self.progress)
        self.tried["corpus"] = statistics.documents
        if statistics.differing > len(differing):
            more = statistics.differing - len(differing)
            self.notes.append(f"{more} more documents differ; only {len(differing)} were kept for explanation")
        self._add(*self.causes.explain(differing, "corpus", self.progress))
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


def _unstable_finding(backend: Backend, letter: str, texts: Sequence[str]) -> Skew | None:
    """Return a finding if a side encodes a text differently when asked again, or has dropout."""
    dropout = ((backend.facts.spec or {}).get("model") or {}).get("dropout")
    first = backend.encode(texts)
    cause = f"{letter} disagrees with itself: it gives the same text different ids the second time"
    finding = Skew("unknown", "encode", cause, "Make this side deterministic before you compare anything with it.", 1)
    if dropout:
        cause = f"{cause}, since model.dropout is {dropout} in its tokenizer.json"
        fix = "Remove dropout from tokenizer.json: it is meant for training a model, and makes ids random."
        finding = Skew("model settings", "encode", cause, fix, 1)
    for _ in range(20 if dropout else 1):
        rows = zip(texts, first, backend.encode(texts), strict=True)
        if different := [row for row in rows if row[1] != row[2]]:
            text, *ids = min(different, key=lambda row: len(row[0]))
            return replace(finding, example=text, a=result(backend, ids[0]), b=result(backend, ids[1]))
    backend.remember(texts, first)
    return finding if dropout else None


def _decode_findings(a: Backend, b: Backend, sequences: Mapping[tuple[int, ...], str]) -> list[Skew]:
    """Return one finding for each way in which the backends decode the same ids to different texts."""
    listed = list(sequences)
    rows = zip(listed, zip(a.decode(listed), b.decode(listed), strict=True), strict=True)
    texts = {ids: pair for ids, pair in rows if pair[0] != pair[1]}

    def examine(ids: tuple[int, ...]) -> tuple[str, Skew, Callable[[list[tuple[int, ...]]], Sequence[bool]]]:
        kind, what, fix = _decode_cause(a, b, *texts[ids])

        def same_way(ids: Sequence[int]) -> bool:
            a_text, b_text = a.decode([ids])[0], b.decode([ids])[0]
            return a_text != b_text and _decode_cause(a, b, a_text, b_text)[0] == kind

        small = tuple(smallest(ids, same_way))
        results = result(a, small, a.decode([small])[0]), result(b, small, b.decode([small])[0])
        finding = Skew(kind, "decode", what, fix, 1, (), small, *results)
        return kind, finding, lambda others: [_decode_cause(a, b, *texts[other])[0] == kind for other in others]

    inputs = [(sequences[ids], ids) for ids in sorted(texts, key=len)]
    return explain(inputs, len(inputs), examine, lambda _: None)[0]


def _decode_cause(a: Backend, b: Backend, a_text: str, b_text: str) -> tuple[Kind, str, str]:
    ours, theirs = (part_of(side.facts.spec, "decoder") if side.facts.spec else None for side in (a, b))
    specs_known = a.facts.spec is not None and b.facts.spec is not None
    if specs_known and ours != theirs and a.facts.cleans_up == b.facts.cleans_up:
        what = f"the decoder is {brief(ours)} in A and {brief(theirs)} in B"
        return "decoder", what, SAME_FILES if a.facts.kind == b.facts.kind else LOAD_THE_FILE
    if _cleaned(a_text) == b_text or _cleaned(b_text) == a_text:
        letter = "B" if _cleaned(a_text) == b_text else "A"
        what = f"{letter} removes spaces before punctuation when decoding (clean_up_tokenization_spaces)"
        return "decode clean-up", what, _NO_CLEAN_UP
    if a_text.strip(" ") == b_text.strip(" "):
        return "decoder", "one side drops or adds a space at an end of the decoded text", LOAD_THE_FILE
    if "�" in a_text + b_text:
        return "decoder", "the sides decode bytes of incomplete characters differently", LOAD_THE_FILE
    return "decoder", "the sides decode the same ids to different texts", SAME_FILES


def _cleaned(text: str) -> str:
    for spaced in _CLEAN_UP:
        text = text.replace(spaced, spaced.strip())
    return text
