"""Define the `Certificate` of a tokenizer and template: which bridges are exact, what parses, what is dropped.

`certify` makes certificates. This module defines their fields, reads and writes them, and checks what a user requires.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

from tokentape.chat import _grammar as grammar
from tokentape.types import Message, html_table

Strategy = Literal["local", "contextual", "fork", "refused"]

FORMAT = 4
"""Version of the certificate's JSON."""

_SURROGATE = re.compile("[\ud800-\udfff]")

FEATURES: Mapping[str, tuple[str, ...]] = {
    "reasoning": ("reasoning",),
    "calls": ("call", "no arguments", "typed arguments", "multi-line argument", "quotes in an argument"),
    "parallel": ("parallel calls",),
    "injection": (),
}
"""Features that may be required besides continuations, each with the parse checks that must pass."""

REQUIRABLE = (*grammar.NAMES, *FEATURES)
"""Every name that `shortfalls` accepts."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Whether and how a turn can be continued with one kind of new messages."""

    name: str
    """See `grammar.continuation_name`."""
    strategy: Strategy
    """`local`: what follows a turn does not depend on the history. `contextual`: it does, but is only appended.
    `fork`: the template repeats earlier text after the turn. `refused`: the template does not accept the messages."""
    append_only: Literal["yes", "clean text", "no"]
    """Whether rendering the longer conversation keeps the ids of the shorter one and of the turn. `clean text`: yes,
    unless the turn is empty or has white space at its ends."""
    tried: int
    """The number of conversations tried."""
    reason: str
    """Why the continuation is not append-only, or is refused; empty otherwise."""
    counterexample: tuple[Message, ...] = ()
    """The smallest tried conversation in which the template rewrites earlier text."""
    ends: tuple[str, ...] = ()
    """The stop tokens with which the template ends the turn here. A turn that ended with a different stop token is
    bridged or starts a new branch, depending on the gateway's `stop_mismatch`."""


@dataclass(frozen=True, slots=True)
class ParseCheck:
    """Whether the parser reads a message back from what the template writes for it."""

    name: str
    holds: bool | None
    """None if the template writes no such turn, or not all of it, so that it can't be compared."""
    detail: str


@dataclass(frozen=True, slots=True)
class Certificate:
    """What `certify` found for one tokenizer, template and set of template kwargs."""

    fingerprint: str
    template_kwargs: Mapping[str, Any]
    versions: Mapping[str, str]
    overrides: str | None
    """The name of the overrides that replace what is read from the template; None without overrides."""
    continuations: tuple[Continuation, ...]
    parsing: tuple[ParseCheck, ...]
    call_style: str | None
    reasoning: tuple[str, str] | None
    """The opening and closing delimiters; None if the template shows no reasoning."""
    reasoning_opened_by_prompt: bool
    generation_prompt: str
    stop_tokens: tuple[str, ...]
    date_dependent: bool
    dropped: tuple[str, ...]
    """What the template silently leaves out."""
    injection_safe: bool
    control_tokens: tuple[str, ...] = ()
    """Added tokens as which callers' text is never encoded."""
    text_tokens: tuple[str, ...] = ()
    """Added tokens that are ordinary text, such as HTML tags. Callers' text is encoded as them, as in `tokenizers`."""
    replaced_ids: tuple[tuple[str, int, int], ...] = ()
    """Added tokens with different ids in the library than in tokenizer.json: (token, declared id, id in use)."""

    def continuation(self, name: str) -> Continuation | None:
        """Return the continuation with this name (see `grammar.continuation_name`), or None."""
        return next((continuation for continuation in self.continuations if continuation.name == name), None)

    def shortfalls(self, required: Sequence[str]) -> Iterator[str]:
        """Yield a line for each name in `required`, taken from `REQUIRABLE`, that is not certified.

        A continuation is certified unless it is refused. One that begins with a tool result must also pass the `calls`
        checks, because an agent that gets its calls as content never sends a result. A feature is certified if all its
        parse checks in `FEATURES` were made and hold; `injection` if control tokens in callers' text stay text.
        """
        for name in dict.fromkeys(required):
            if name == "injection":
                if not self.injection_safe:
                    yield f"{name}: callers' text can become control tokens"
            elif name in FEATURES:
                failed = self._failed(name)
                if name == "reasoning" and self.reasoning is None:
                    yield f"{name}: the template shows no reasoning"
                elif failed:
                    yield f"{name}: {failed[0].name}: {failed[0].detail}"
            else:
                continuation = self.continuation(name)
                if continuation is None or continuation.strategy == "refused":
                    yield f"{name}: {'not tried' if continuation is None else continuation.reason}"
                elif name.startswith("tool") and (failed := self._failed("calls")):
                    what = "calls are not parsed, so agents get them as content"
                    if failed[0].name != "call":
                        what = "not every call is parsed as it was written"
                    yield f"{name}: the continuation is exact, but {what}: {failed[0].name}: {failed[0].detail}"

    def _failed(self, feature: str) -> list[ParseCheck]:
        """Return a feature's parse checks that were not made or do not hold."""
        checks = {check.name: check for check in self.parsing}
        return [checks[name] for name in FEATURES[feature] if checks[name].holds is not True]

    def _repr_html_(self) -> str:
        facts = {
            "generation prompt": self.generation_prompt,
            "stop tokens": ", ".join(self.stop_tokens),
            "calls": self.call_style or "none",
            "reasoning": "none" if self.reasoning is None else " … ".join(self.reasoning),
            "callers' text stays text": "yes" if self.injection_safe else "NO",
            "depends on the date": "yes" if self.date_dependent else "no",
            "silently drops": ", ".join(self.dropped) or "nothing that was tried",
            "overridden by": self.overrides or "nothing",
        }
        words = {True: "holds", False: "FAILS", None: "not tried"}
        continued = [
            (
                f"continued by {continuation.name}",
                continuation.strategy,
                f"append-only: {continuation.append_only}",
                continuation.reason,
            )
            for continuation in self.continuations
        ]
        parsed = [(f"parsing {check.name}", words[check.holds], check.detail) for check in self.parsing]
        return html_table(f"Certificate {self.fingerprint[:12]}", [*facts.items(), *continued, *parsed])

    def to_json(self) -> str:
        """Return a JSON object with sorted keys. It is valid UTF-8: lone surrogates are written as `U+XXXX`."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, indent=1, ensure_ascii=False)
        return _SURROGATE.sub(lambda match: f"U+{ord(match[0]):04X}", text)

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Read the output of `to_json`. Raises `ValueError` if the text is not a certificate of this format."""
        try:
            fields = json.loads(text)
            if fields.pop("format", None) != FORMAT or fields.keys() != cls.__dataclass_fields__.keys():
                raise ValueError(f"it is not in format {FORMAT}; run `tokentape certify` again")
            return msgspec.convert(fields, cls)
        except (ValueError, AttributeError, TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"not a certificate: {error}") from error
