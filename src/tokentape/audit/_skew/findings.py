"""The result of an audit: findings, and the report that holds them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tokentape.audit._report import json_value
from tokentape.audit._skew.backends.base import BackendFacts, SkewChat

Kind: TypeAlias = Literal[
    "normalizer", "pre-tokenizer", "added token", "vocabulary", "merges", "model settings", "BOS/EOS", "decoder",
    "decode clean-up", "template", "generation prompt", "template kwargs", "special tokens", "date", "JSON", "booleans",
    "content parts", "control text", "tools", "reasoning", "loss mask", "padding", "truncation", "stop ids",
    "embedding rows", "server", "library", "unknown",
]  # fmt: skip
"""The kind of a difference. `control text`: only one side turns text of messages into control tokens. `library`: files
and settings are equal, but the libraries that run them differ. `truncation`: a side cuts or pads texts. `server`: a
server samples from a prompt other than the one that it renders."""

Probe: TypeAlias = Literal["encode", "corpus", "special", "decode", "render", "masks", "echo", "facts"]
"""A group of checks: texts of the battery, the user's corpus, texts with BOS and EOS, decoding of ids, conversations,
loss masks, the prompt that a server sampled from, and the facts of the backends."""

Severity: TypeAlias = Literal["skew", "caution"]
"""`skew`: the same input gets different ids, text or masks. `caution`: this alone makes no difference, but training or
serving with it may."""

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
    """Made from one backend by changing only the cause, so that it gives the ids of the other backend."""
    gives: str = "b"
    """The backend that `encoder` reproduces, `a` or `b`."""
    explains: Callable[[SkewChat, str, str], bool] | None = None
    """Takes a conversation and the text of each side. Returns True if this cause alone explains the difference."""
    severity: Severity = "skew"


@dataclass(frozen=True, slots=True)
class SkewResult:
    """The ids or text that one backend returned for an input, or its refusal."""

    ids: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    """The spelling of each id; empty if unknown."""
    text: str | None = None
    refused: str | None = None
    """The reason if the backend refused the input; the other fields are empty then."""


@dataclass(frozen=True, slots=True)
class Skew:
    """One cause by which two backends differ, with the smallest input that shows it."""

    kind: Kind
    probe: Probe
    """The probe that showed it first."""
    cause: str
    fix: str
    count: int
    """The number of inputs that differ for this cause."""
    where: tuple[str, ...] = ()
    """The battery groups, conversations or files of these inputs, the first few."""
    example: str | SkewChat | tuple[int, ...] | None = None
    """The smallest text, conversation or ids that show it."""
    a: SkewResult = SkewResult()
    b: SkewResult = SkewResult()
    severity: Severity = "skew"


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
        """10^6 bytes per second, each encoded by both backends."""
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
    """Descriptions of what the audit did not compare."""

    @property
    def skewed(self) -> bool:
        """True if the backends differ. A caution is no skew."""
        return any(finding.severity == "skew" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as `--json` prints it, without the tokenizer.json of either backend."""
        found: dict[str, Any] = json_value({name: getattr(self, name) for name in self.__slots__ if name not in "ab"})
        for one, written in zip(self.findings, found["findings"], strict=True):
            written["example"] = _example(one.example)
            for side in (written["a"], written["b"]):
                for name in [name for name in ("text", "refused") if side[name] is None]:
                    del side[name]
        if self.corpus is not None:
            found["corpus"]["megabytes_per_second"] = round(self.corpus.megabytes_per_second, 3)
        sides = {"a": _facts(self.a), "b": _facts(self.b)}
        return {"format": 1, "skewed": self.skewed, **sides, **found, "seconds": round(self.seconds, 3)}


def parts(facts: BackendFacts) -> dict[str, str]:
    """Return normalizer, pre-tokenizer, post-processor, decoder and model settings, each as compact JSON."""
    if facts.spec is None:
        return {}
    found = {name: facts.spec.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")}
    found["model"] = {key: value for key, value in facts.spec["model"].items() if key not in ("vocab", "merges")}
    return {name: json.dumps(part, ensure_ascii=False, sort_keys=True) for name, part in found.items()}


def _facts(facts: BackendFacts) -> dict[str, Any]:
    names = ("name", "kind", "versions", "files", "vocab_size", "special_tokens", "cleans_up", "notes")
    found = json_value({name: getattr(facts, name) for name in names})
    return {**found, "added_tokens": len(facts.added), "parts": parts(facts)}


def _example(example: str | SkewChat | tuple[int, ...] | None) -> Any:
    match example:
        case SkewChat(messages, tools, generate):
            return {"messages": list(messages), "tools": list(tools), "add_generation_prompt": generate}
        case tuple():
            return {"ids": list(example)}
        case str():
            return {"text": example}
    return None
