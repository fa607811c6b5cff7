"""What an audit found: its findings, and the report that holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tokentape.audit.report import json_value
from tokentape.audit.skew.sides.base import SideFacts, SkewChat

Kind: TypeAlias = Literal[
    "normalizer",
    "pre-tokenizer",
    "added token",
    "vocabulary",
    "merges",
    "model settings",
    "BOS/EOS",
    "decoder",
    "decode clean-up",
    "template",
    "generation prompt",
    "template kwargs",
    "special tokens",
    "date",
    "JSON",
    "booleans",
    "content parts",
    "control text",
    "tools",
    "reasoning",
    "loss mask",
    "padding",
    "server",
    "library",
    "unknown",
]
"""What two sides differ in. `control text`: control tokens that messages spell. `library`: files and settings are
alike, what runs them is not. `server`: it samples from another prompt than it says it renders."""

Probe: TypeAlias = Literal["encode", "corpus", "special", "decode", "render", "masks", "echo", "facts"]
"""What was tried: texts of the battery, the user's corpus, texts with BOS and EOS, ids back to text, conversations,
loss masks, the prompt that a server says it used, and what the sides say of themselves."""

Severity: TypeAlias = Literal["skew", "caution"]
"""`skew`: the same input has other ids, text or masks. `caution`: nothing differs by itself, but what trainers do with
it may."""


@dataclass(frozen=True, slots=True)
class SkewResult:
    """What one side made of an input."""

    ids: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    """How the side writes the ids; as many, or none if it does not tell."""
    text: str | None = None
    """What was decoded, or what the template wrote."""
    refused: str | None = None
    """Why there is nothing else."""


@dataclass(frozen=True, slots=True)
class Skew:
    """One cause by which two sides differ, with the smallest input that shows it."""

    kind: Kind
    probe: Probe
    """The probe that showed it first."""
    cause: str
    """The likely cause, in words."""
    fix: str
    """What to do about it."""
    count: int
    """Inputs tried that differ by this cause."""
    where: tuple[str, ...] = ()
    """Groups of the battery, names of conversations or files that they are from: the first few."""
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
    """As side A counts them."""
    differing: int
    """Documents that the sides encode differently."""
    seconds: float

    @property
    def megabytes_per_second(self) -> float:
        """10^6 bytes a second, each encoded by both sides."""
        return self.bytes / 1e6 / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Everything that an audit of two sides found."""

    a: SideFacts
    b: SideFacts
    findings: tuple[Skew, ...]
    tried: Mapping[Probe, int]
    """Inputs compared, by probe."""
    skipped: Mapping[Probe, str]
    """Probes that were not tried, and why."""
    notes: tuple[str, ...]
    seconds: float
    corpus: CorpusStatistics | None = None

    @property
    def skewed(self) -> bool:
        """Whether the sides differ: a caution is no skew."""
        return any(finding.severity == "skew" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as `--json` prints it, without the tokenizer.json of either side."""
        findings = [
            {**json_value(one), "example": _example(one.example), "a": _outcome(one.a), "b": _outcome(one.b)}
            for one in self.findings
        ]
        corpus = self.corpus
        speed = {} if corpus is None else {"megabytes_per_second": round(corpus.megabytes_per_second, 3)}
        return {
            "format": 1,
            "skewed": self.skewed,
            "a": _side(self.a),
            "b": _side(self.b),
            "findings": findings,
            "tried": dict(self.tried),
            "skipped": dict(self.skipped),
            "notes": list(self.notes),
            "corpus": None if corpus is None else json_value(corpus) | speed,
            "seconds": round(self.seconds, 3),
        }


def _side(facts: SideFacts) -> dict[str, Any]:
    return {
        "name": facts.name,
        "kind": facts.kind,
        "versions": dict(facts.versions),
        "files": dict(facts.files),
        "vocab_size": facts.vocab_size,
        "added_tokens": len(facts.added),
        "special_tokens": dict(facts.special_tokens),
        "cleans_up": facts.cleans_up,
        "parts": parts(facts),
        "notes": list(facts.notes),
    }


def parts(facts: SideFacts) -> dict[str, str]:
    """A side's normalizer, pre-tokenizer, post-processor, decoder and model settings, each as compact JSON."""
    if facts.spec is None:
        return {}
    found = {
        name: json.dumps(facts.spec.get(name), ensure_ascii=False, sort_keys=True)
        for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    }
    settings = {key: value for key, value in facts.spec["model"].items() if key not in ("vocab", "merges")}
    return {**found, "model": json.dumps(settings, ensure_ascii=False, sort_keys=True)}


def _example(example: str | SkewChat | tuple[int, ...] | None) -> Any:
    match example:
        case SkewChat():
            return {
                "messages": list(example.messages),
                "tools": list(example.tools),
                "add_generation_prompt": example.generate,
            }
        case tuple():
            return {"ids": list(example)}
        case str():
            return {"text": example}
    return None


def _outcome(outcome: SkewResult) -> dict[str, Any]:
    optional = {"text": outcome.text, "refused": outcome.refused}
    known = {name: value for name, value in optional.items() if value is not None}
    return {"ids": list(outcome.ids), "tokens": list(outcome.tokens), **known}
