"""Pinned sampling parameters, which callers can't change, and defaults for parameters that callers don't set.

They are set for a gateway, and a session may add more when it is created. If a pin overrides a caller's value, the
reply header `X-Tokentape-Overridden` and `asked` in the turn's sampling parameters contain that value.
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
from tokentape.gateway._http import explain

Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2)]
TopP: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
MinP: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty: TypeAlias = Annotated[float, Meta(ge=0.01, le=100)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Adapter: TypeAlias = Annotated[str, Meta(min_length=1)]
StopString: TypeAlias = Annotated[str, Meta(min_length=1)]
Stop: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=16)]

Overridden: TypeAlias = Mapping[str, tuple[Any, Any]]
"""Maps each parameter to the value that the caller requested and the pinned value that was used."""

METADATA_KEY = "tokentape_sampling"
"""Key in session metadata for the session's pins and defaults: {"pin": {...}, "default": {...}}."""

_FIELDS = {"stop": "stop_strings"}
"""Maps parameters to the `SamplingParams` fields that have a different name."""

_IN_BODIES = {"stop_sequences": "stop", "max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens"}
"""Maps names in some wire APIs to the name of the parameter."""

_TYPES: dict[str, Any] = {
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
NAMES = tuple(_TYPES)
"""Parameters that can be pinned: `adapter`, and others with the names used in OpenAI and vLLM requests."""


@dataclass(frozen=True, slots=True)
class Pins:
    """Pinned and default values by parameter, with the types of `SamplingParams`."""

    pinned: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, pinned: Mapping[str, Any], defaults: Mapping[str, Any], *, strict: bool = True) -> Self:
        """Return pins from two JSON objects: values that callers can't change, and values for calls that set none.

        Numbers may be strings unless `strict`. Raises `InvalidRequest` for an unknown name or an invalid value.
        """
        return cls(_read(pinned, "pin", strict=strict), _read(defaults, "default", strict=strict))

    def with_session(self, metadata: Mapping[str, Any]) -> Pins:
        """Add the pins and defaults in session metadata. Raises `InvalidRequest` if a session changes a pin."""
        if METADATA_KEY not in metadata:
            return self
        settings = metadata[METADATA_KEY]
        if not isinstance(settings, Mapping) or not all(
            isinstance(settings.get(name, {}), Mapping) for name in settings
        ):
            raise InvalidRequest(f"metadata.{METADATA_KEY} must be an object of objects pin and default", "metadata")
        session_pins = Pins.read(settings.get("pin", {}), settings.get("default", {}))
        for name, value in session_pins.pinned.items():
            if self.pinned.get(name, value) != value:
                raise InvalidRequest(f"this gateway pins {name} to {self.pinned[name]!r}; omit it", f"pin.{name}")
        return Pins({**self.pinned, **session_pins.pinned}, {**self.defaults, **session_pins.defaults})

    def check(self, engine: EngineInfo) -> None:
        """Raise `UnsupportedParameter` if the engine would ignore any of the values."""
        plain = SamplingParams(max_tokens=0)
        for name, value in {**self.defaults, **self.pinned}.items():
            field = _FIELDS.get(name, name)
            if field not in engine.sampling and value != getattr(plain, field):
                raise UnsupportedParameter(f"the engine {engine.name!r} does not support {name}: don't set it", name)

    def applied(self, sampling: SamplingParams, set_parameters: Collection[str]) -> tuple[SamplingParams, Overridden]:
        """Apply pins and defaults to `sampling`, in which the caller has set `set_parameters`.

        Return the new parameters, and the caller's values that pins have overridden.
        """
        used = {**{name: value for name, value in self.defaults.items() if name not in set_parameters}, **self.pinned}
        requested = {name: getattr(sampling, _FIELDS.get(name, name)) for name in self.pinned if name in set_parameters}
        params = replace(sampling, **{_FIELDS.get(name, name): value for name, value in used.items()})
        return params, {name: (value, used[name]) for name, value in requested.items() if value != used[name]}


def parameters_set_in(body: Mapping[str, Any]) -> frozenset[str]:
    """Return the parameters in `NAMES` that a request body sets, under the name in any wire API."""
    names = [_IN_BODIES.get(name, name) for name, value in body.items() if value is not None]
    return frozenset(NAMES).intersection(names)


def header(overridden: Overridden) -> str:
    """Return the header `X-Tokentape-Overridden`, for example `temperature=1.0;asked=0.2`, without values of `stop`."""
    return ", ".join(
        name if name == "stop" else f"{name}={json.dumps(used)};asked={json.dumps(requested)}"
        for name, (requested, used) in overridden.items()
    )


def _read(values: Mapping[str, Any], kind: str, *, strict: bool) -> Mapping[str, Any]:
    read = {}
    for name, value in values.items():
        if name not in _TYPES:
            raise InvalidRequest(f"{kind} {name!r} can't be set; expected one of {', '.join(NAMES)}", kind)
        try:
            read[name] = msgspec.convert(value, _TYPES[name], strict=strict)
        except msgspec.ValidationError as error:
            reason, where = explain(error)
            raise InvalidRequest(f"{kind}.{name}{where}: {reason}", kind) from None
    if "stop" in read:
        read["stop"] = (read["stop"],) if isinstance(read["stop"], str) else tuple(read["stop"])
    if "top_k" in read:
        read["top_k"] = max(read["top_k"], 0)
    return {name: read[name] for name in NAMES if name in read}
