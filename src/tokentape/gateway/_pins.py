"""Sampling parameters that callers can't change, and those that hold where a caller names none.

A gateway has some, and a session may add its own when it is created. What a caller asked for in vain is in the header
`X-Tokentape-Overridden` of the reply and, as `asked`, in the turn's sampling parameters.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self, TypeAlias

import msgspec
from msgspec import Meta

from tokentape.engines._base import EngineInfo, SamplingParams
from tokentape.errors import InvalidRequest, UnsupportedParameter

Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2)]
TopP: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31)]
MinP: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty: TypeAlias = Annotated[float, Meta(gt=0, le=100)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Adapter: TypeAlias = Annotated[str, Meta(min_length=1)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1)]
Stop: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=16)]

Overridden: TypeAlias = Mapping[str, tuple[Any, Any]]
"""By parameter what a caller asked for in vain, and what is used."""

METADATA = "tokentape_sampling"
"""Where the metadata of a session hold its pins and defaults: {"pin": {...}, "default": {...}}."""

_FIELDS = {"stop": "stop_strings"}
"""Fields of `SamplingParams` that have another name here."""

_IN_BODIES = {"stop_sequences": "stop", "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens"}


_KINDS: dict[str, Any] = {
    "temperature": Temperature,
    "top_p": TopP,
    "top_k": TopK,
    "min_p": MinP,
    "max_tokens": Count,
    "presence_penalty": Penalty,
    "frequency_penalty": Penalty,
    "repetition_penalty": RepetitionPenalty,
    "seed": Seed,
    "stop": Stop,
    "adapter": Adapter,
}
NAMES = tuple(_KINDS)
"""The parameters that can be pinned: `adapter`, and others by their names in OpenAI's and vLLM's requests."""


@dataclass(frozen=True, slots=True)
class Pins:
    """Pinned and default values by parameter, as they are in `SamplingParams`."""

    pinned: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, pinned: Mapping[str, Any], defaults: Mapping[str, Any], *, strict: bool = True) -> Self:
        """Return the pins of JSON objects; with `strict` off a number may be text. Raises `InvalidRequest`."""
        return cls(_read(pinned, "pin", strict=strict), _read(defaults, "default", strict=strict))

    def with_session(self, metadata: Mapping[str, Any]) -> Pins:
        """Return these with those of a session. Raises `InvalidRequest` if one is pinned to something else here."""
        if METADATA not in metadata:
            return self
        found = metadata[METADATA]
        if not isinstance(found, Mapping) or not all(isinstance(found.get(one, {}), Mapping) for one in found):
            raise InvalidRequest(f"metadata.{METADATA} must be an object of pin and default, objects too", "metadata")
        own = Pins.read(found.get("pin", {}), found.get("default", {}))
        for name, value in own.pinned.items():
            if self.pinned.get(name, value) != value:
                raise InvalidRequest(f"this gateway pins {name} to {self.pinned[name]!r}; leave it out", f"pin.{name}")
        return Pins({**self.pinned, **own.pinned}, {**self.defaults, **own.defaults})

    def check(self, engine: EngineInfo) -> None:
        """Raise `UnsupportedParameter` for a value that the engine would ignore."""
        plain = SamplingParams(max_tokens=0)
        for name, value in {**self.defaults, **self.pinned}.items():
            one = _FIELDS.get(name, name)
            if one not in engine.sampling and value != getattr(plain, one):
                raise UnsupportedParameter(f"the engine {engine.name!r} does not support {name}: don't pin it", name)

    def applied(self, sampling: SamplingParams, given: Collection[str]) -> tuple[SamplingParams, Overridden]:
        """Return how to sample in place of `sampling`, of which the caller gave the parameters `given`.

        Also returns, by parameter, the value that the caller asked for and the pinned one used instead.
        """
        used = {**{name: value for name, value in self.defaults.items() if name not in given}, **self.pinned}
        asked = {name: getattr(sampling, _FIELDS.get(name, name)) for name in self.pinned if name in given}
        found = replace(sampling, **{_FIELDS.get(name, name): value for name, value in used.items()})
        return found, {name: (value, used[name]) for name, value in asked.items() if value != used[name]}


def given_in(body: Mapping[str, Any]) -> frozenset[str]:
    """Return which of `NAMES` a request's body gives, whatever its API calls them."""
    names = (_IN_BODIES.get(name, name) for name, value in body.items() if value is not None)
    return frozenset(name for name in names if name in NAMES)


def header(overridden: Overridden) -> str:
    """Return what a reply's header says: `temperature=1.0;asked=0.2`, stop strings by their name alone."""
    return ", ".join(
        name if name == "stop" else f"{name}={json.dumps(used)};asked={json.dumps(asked)}"
        for name, (asked, used) in overridden.items()
    )


def _read(values: Mapping[str, Any], kind: str, *, strict: bool) -> Mapping[str, Any]:
    found = {}
    for name, value in values.items():
        if name not in _KINDS:
            raise InvalidRequest(f"{kind} {name!r} is no sampling parameter; expected {', '.join(NAMES)}", kind)
        try:
            found[name] = msgspec.convert(value, _KINDS[name], strict=strict)
        except msgspec.ValidationError as error:
            reason = str(error).partition(" - at `$")
            where = f"{name}{reason[2].rstrip('`')}"
            raise InvalidRequest(f"{kind}.{where}: {reason[0][:1].lower()}{reason[0][1:]}", kind) from None
    if "stop" in found:
        found["stop"] = (found["stop"],) if isinstance(found["stop"], str) else tuple(found["stop"])
    if "top_k" in found:
        found["top_k"] = max(found["top_k"], 0)
    return {name: found[name] for name in NAMES if name in found}
