"""The report of an audit: its findings, and their layout for a terminal, a page or a CI system."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from tokentape._alignment import first_difference
from tokentape.audit import _report as blocks
from tokentape.audit._skew.backends import BackendFacts, SkewChat

Kind: TypeAlias = Literal[
    "normalizer", "pre-tokenizer", "added token", "vocabulary", "merges", "model settings", "BOS/EOS", "decoder",
    "decode clean-up", "template", "generation prompt", "template kwargs", "special tokens", "date", "JSON", "booleans",
    "content parts", "control text", "tools", "reasoning", "loss mask", "padding", "truncation", "stop ids",
    "embedding rows", "server", "library", "unknown",
]  # fmt: skip
"""The kind of a difference. `control text`: only one side turns message text into control tokens. `library`: files and
settings are equal, but the libraries that run them differ. `truncation`: a side truncates or pads texts. `server`: a
server samples from a different prompt than it renders."""

Probe: TypeAlias = Literal["encode", "corpus", "special", "decode", "render", "masks", "echo", "facts"]
"""A group of checks: battery texts, the user's corpus, texts with BOS and EOS, decoding ids, conversations, loss masks,
the prompt that a server sampled from, and facts about the backends."""

Severity: TypeAlias = Literal["skew", "caution"]
"""`skew`: the same input gets different ids, text or masks. `caution`: nothing differs yet, but training or serving may
with this setting."""

Encoder: TypeAlias = Callable[[Sequence[str]], list[list[int]]]
"""A function that encodes texts without BOS and EOS."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of a difference."""

    kind: Kind
    what: str
    fix: str
    key: str
    encoder: Encoder | None = None
    """One backend with only the cause changed, which gives the other backend's ids."""
    gives: str = "b"
    """The backend whose ids `encoder` gives, `a` or `b`."""
    explains: Callable[[SkewChat, str, str], bool] | None = None
    """Returns True if this cause alone explains the difference between two texts of a conversation."""
    severity: Severity = "skew"


@dataclass(frozen=True, slots=True)
class SkewResult:
    """The ids or text that one backend returned for an input, or its refusal."""

    ids: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    """The token string of each id; empty if unknown."""
    text: str | None = None
    refused: str | None = None
    """Why the backend refused the input; then the other fields are empty."""


@dataclass(frozen=True, slots=True)
class Skew:
    """A cause why two backends differ, with the smallest input that shows it."""

    kind: Kind
    probe: Probe
    """The probe that first showed the difference."""
    cause: str
    fix: str
    count: int
    """The number of inputs that differ because of this cause."""
    where: tuple[str, ...] = ()
    """The first few battery groups, conversations or files of these inputs."""
    example: str | SkewChat | tuple[int, ...] | None = None
    """The smallest text, conversation or ids that show the difference."""
    a: SkewResult = SkewResult()
    b: SkewResult = SkewResult()
    severity: Severity = "skew"


@dataclass(frozen=True, slots=True)
class Differing:
    """A text that the backends encode differently."""

    text: str
    where: str
    """The text's group in the battery, or its file."""
    a_ids: list[int]
    b_ids: list[int]


@dataclass(frozen=True, slots=True)
class CorpusStatistics:
    """How much of a corpus was compared, and how fast."""

    files: int
    documents: int
    characters: int
    bytes: int
    tokens: int
    """Counted by backend A."""
    differing: int
    """Documents that the backends encode differently."""
    seconds: float
    conversations: int = 0
    """Records with `messages` that at least one side rendered."""
    differing_conversations: int = 0

    @property
    def megabytes_per_second(self) -> float:
        return self.bytes / 1e6 / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Everything that an audit of two backends found."""

    a: BackendFacts
    b: BackendFacts
    findings: tuple[Skew, ...]
    tried: Mapping[Probe, int]
    skipped: Mapping[Probe, str]
    notes: tuple[str, ...]
    seconds: float
    corpus: CorpusStatistics | None = None
    uncovered: tuple[str, ...] = ()
    """What the audit did not compare."""

    @property
    def skewed(self) -> bool:
        """True if the backends differ. Cautions don't count."""
        return any(finding.severity == "skew" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as `--json` prints it, without the tokenizer.json of either backend."""
        report: dict[str, Any] = blocks.json_value(
            {name: getattr(self, name) for name in self.__slots__ if name not in "ab"}
        )
        for finding, fields in zip(self.findings, report["findings"], strict=True):
            fields["example"] = _example_as_json(finding.example)
            for side in (fields["a"], fields["b"]):
                for name in [name for name in ("text", "refused") if side[name] is None]:
                    del side[name]
        if self.corpus is not None:
            report["corpus"]["megabytes_per_second"] = round(self.corpus.megabytes_per_second, 3)
        sides = {"a": _facts(self.a), "b": _facts(self.b)}
        return {"format": 1, "skewed": self.skewed, **sides, **report, "seconds": round(self.seconds, 3)}


def parts(facts: BackendFacts) -> dict[str, str]:
    """Return normalizer, pre-tokenizer, post-processor, decoder and model settings, each as compact JSON."""
    if facts.spec is None:
        return {}
    by_name = {name: facts.spec.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")}
    by_name["model"] = {key: value for key, value in facts.spec["model"].items() if key not in ("vocab", "merges")}
    return {name: json.dumps(part, ensure_ascii=False, sort_keys=True) for name, part in by_name.items()}


def _facts(facts: BackendFacts) -> dict[str, Any]:
    names = ("name", "kind", "versions", "files", "vocab_size", "special_tokens", "cleans_up", "notes")
    values = blocks.json_value({name: getattr(facts, name) for name in names})
    return {**values, "added_tokens": len(facts.added), "parts": parts(facts)}


def _example_as_json(example: str | SkewChat | tuple[int, ...] | None) -> Any:
    match example:
        case SkewChat(messages, tools, generate):
            return {"messages": list(messages), "tools": list(tools), "add_generation_prompt": generate}
        case tuple():
            return {"ids": list(example)}
        case str():
            return {"text": example}
    return None


_TOKENS = 8
_TEXT = 70
_AROUND = 40

_HARD_TO_SEE = ("Mn", "Mc", "Me", "Cc", "Cf", "Co", "Cn", "Cs", "Zs", "Zl", "Zp")

_TRIED: Mapping[Probe, str] = {
    "encode": "texts",
    "corpus": "documents",
    "special": "texts with BOS and EOS",
    "decode": "decodings",
    "render": "conversations",
    "masks": "loss masks",
    "echo": "server prompts",
    "facts": "facts",
}


def audit_layout(report: AuditReport) -> blocks.Report:
    """Return the audit as blocks: both backends, what was tried, each finding, and finally the verdict."""
    return blocks.Report(f"Audit of {report.a.name} and {report.b.name}", list(_blocks(report)))


RULES = {kind: f"the sides differ in: {kind}" for kind in get_args(Kind)}


def audit_cases(report: AuditReport) -> list[blocks.CiCase]:
    """Return a case for each probe that was tried, with its findings, for CI systems."""
    cases = []
    for probe in dict.fromkeys([*report.tried, *(finding.probe for finding in report.findings)]):
        findings = []
        for finding in report.findings:
            if finding.probe != probe:
                continue
            lines = [
                f"{name}: {value}" if name != "cause" else f"{value}: {_inputs(finding)}"
                for name, value in _rows(finding)
            ]
            level: Literal["warning", "error"] = "warning" if finding.severity == "caution" else "error"
            findings.append(blocks.CiFinding(finding.kind, level, finding.kind, "\n".join(lines)))
        tried = f"{report.tried[probe]} " if probe in report.tried else ""
        cases.append(blocks.CiCase(f"{tried}{_TRIED[probe]}", findings))
    return cases + [blocks.CiCase(f"not tried: {_TRIED[probe]}", skipped=why) for probe, why in report.skipped.items()]


def _rows(finding: Skew) -> Iterator[tuple[str, str]]:
    yield "cause", finding.cause
    if finding.example is not None:
        yield "smallest", _example(finding.example)
        for letter, outcome, other in (("A", finding.a, finding.b), ("B", finding.b, finding.a)):
            yield from ((letter, line) for line in _outcome_lines(outcome, other))
    yield "fix", finding.fix


def _blocks(report: AuditReport) -> Iterator[blocks.Block]:
    yield blocks.Facts([("A (train)", _backend(report.a)), ("B (serve)", _backend(report.b))])
    yield blocks.Details("Compare A and B", [blocks.Table(["", "A", "B"], _backend_rows(report.a, report.b))])
    tried = ", ".join(f"{count} {_TRIED[probe]}" for probe, count in report.tried.items())
    yield blocks.Paragraph(f"Tried {tried} in {report.seconds:.1f} s.", "dim")
    if report.corpus is not None:
        corpus = report.corpus
        yield blocks.Paragraph(
            f"Corpus: {corpus.files} files, {corpus.documents} documents, {corpus.bytes / 1e6:.1f} MB, {corpus.tokens} "
            f"tokens at {corpus.megabytes_per_second:.1f} MB/s.",
            "dim",
        )
        differing = [(corpus.differing, corpus.documents, "documents")]
        differing += [(corpus.differing_conversations, corpus.conversations, "conversations")]
        for many, of, what in differing:
            if of:
                summary = f"Of your {of:,} {what}, {many:,} ({many / of:.1%}) get different ids on the serving side."
                yield blocks.Paragraph(summary, "fail" if many else "ok")
    for reason in report.skipped.values():
        yield blocks.Paragraph(f"Not tried: {reason}.", "dim")
    for number, finding in enumerate(report.findings, 1):
        yield from _finding(number, finding)
    if report.notes:
        yield blocks.Heading("Notes")
        yield from map(blocks.Paragraph, report.notes)
    ours, theirs = parts(report.a), parts(report.b)
    for name in dict.fromkeys([*ours, *theirs]):
        yield blocks.Details(
            name, [blocks.Code(f"A  {ours.get(name, 'not known')}\n\nB  {theirs.get(name, 'not known')}")]
        )
    skews = sum(finding.severity == "skew" for finding in report.findings)
    yield blocks.Paragraph("")
    if skews:
        yield blocks.Paragraph(f"Skew: {skews} cause{'s' if skews > 1 else ''} found.", "fail")
    else:
        yield blocks.Paragraph(f"Not covered: {'; '.join(report.uncovered)}.", "dim")
        yield blocks.Paragraph("No skew found: the sides agree on everything that was tried.", "ok")


def _backend(facts: BackendFacts) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in facts.versions.items())
    sha256 = facts.files.get("tokenizer.json") or next(iter(facts.files.values()), None)
    hashed = f"  sha256 {sha256[:12]}" if sha256 else ""
    return f"{facts.name}  {facts.kind}{f' ({versions})' if versions else ''}{hashed}"


def _backend_rows(a: BackendFacts, b: BackendFacts) -> list[tuple[str, str, str]]:
    sides: list[dict[str, str]] = []
    for facts in (a, b):
        sizes = {
            "ids end at": str(facts.vocab_size or "not known"),
            "added tokens": str(len(facts.added) or "not known"),
        }
        hashes = {f"{name}, SHA-256": sha256 for name, sha256 in facts.files.items()}
        identity = {"named": facts.name, "loaded as": facts.kind}
        sides.append({**identity, **sizes, **facts.versions, **facts.special_tokens, **hashes})
    ours, theirs = sides
    return [(name, ours.get(name, "-")[:64], theirs.get(name, "-")[:64]) for name in {**ours, **theirs}]


def _finding(number: int, finding: Skew) -> Iterator[blocks.Block]:
    caution = finding.severity == "caution"
    note = f"{_inputs(finding)}{'  (caution)' if caution else ''}"
    yield blocks.Heading(f"{number}. {finding.kind}", 3, note, "warn" if caution else "fail")
    yield blocks.Facts(list(_rows(finding)))
    index = first_difference(finding.a.ids, finding.b.ids)
    start = max(index - _AROUND, 0)
    windows = {"A": finding.a.ids[start : index + _AROUND], "B": finding.b.ids[start : index + _AROUND]}
    ids = {letter: some for letter, some in windows.items() if some}
    if finding.example is not None and ids:
        yield blocks.Details("ids", [blocks.TokenIds(ids, (index - start, index - start + 1))])


def _inputs(finding: Skew) -> str:
    """Describe how many inputs differ, and the groups, conversations or files that they come from."""
    if finding.probe == "facts":
        return "from the files and facts of both sides"
    what = _TRIED[finding.probe] if finding.count > 1 else _TRIED[finding.probe].replace("texts", "text").rstrip("s")
    where = f": {', '.join(finding.where)}" if finding.where else ""
    return f"{finding.count} {what}{where}"


def _example(example: str | SkewChat | tuple[int, ...]) -> str:
    match example:
        case SkewChat():
            prompt = "" if example.generate else ", no generation prompt"
            tools = f", tools {json.dumps(list(example.tools))}" if example.tools else ""
            return f"{json.dumps(list(example.messages))}{tools}{prompt}"
        case tuple():
            return f"ids {list(example)}"
    return quoted(example)


def _outcome_lines(outcome: SkewResult, other: SkewResult) -> list[str]:
    if outcome.refused is not None:
        return [f"refused: {outcome.refused}"]
    line = _ids(outcome.ids, outcome.tokens, max(first_difference(outcome.ids, other.ids) - 2, 0))
    if outcome.text is None:
        return [line]
    start = max(first_difference(outcome.text, other.text or "") - 12, 0)
    before, after = "…" if start else "", "…" if start + _TEXT < len(outcome.text) else ""
    return [line, f"{before}{quoted(outcome.text[start : start + _TEXT])}{after}"]


def _ids(ids: Sequence[int], tokens: Sequence[str], start: int) -> str:
    # Quotes show where a token with invisible ends begins and ends.
    spelled = [quoted(token) if token != token.strip() or "\n" in token or not token else token for token in tokens]
    shown = range(start, min(start + _TOKENS, len(ids)))
    listed = [f"{ids[n]} {spelled[n]}" if tokens else str(ids[n]) for n in shown]
    before, after = "… " if start else "", " …" if start + _TOKENS < len(ids) else ""
    return f"[{before}{', '.join(listed)}{after}]" + (f" ({len(ids)} ids)" if before or after else "")


def quoted(text: str) -> str:
    r"""Return text in quotes, with escapes for combining marks, odd spaces and invisible characters.

    >>> print(quoted("e\u0301 \u00e9"))
    "e\u0301 é"
    """
    return "".join(
        char if char == " " or unicodedata.category(char) not in _HARD_TO_SEE else json.dumps(char)[1:-1]
        for char in json.dumps(text, ensure_ascii=False)
    )
