"""Ask a server which models it serves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tokentape.engines._http import HttpClient, Stage, attempt
from tokentape.engines._replies import decode
from tokentape.errors import EngineContractError, EngineError, InvalidRequest

_ROUTES = ("/v1/completions", "/inference/v1/generate", "/v1/chat/completions/render", "/v1/chat/completions/derender")


@dataclass(frozen=True, slots=True)
class ServedAs:
    """The facts that a server reports about its model. Facts that it does not report are empty or None."""

    ids: frozenset[str]
    """Names of the model and its adapters, as used in requests."""
    names: frozenset[str]
    """Names of the model, and the paths or Hub repo ids that its weights were loaded from, without adapters."""
    max_model_len: int | None = None
    model_type: str | None = None
    """The `model_type` of config.json."""
    hidden_size: int | None = None
    by_gateway: bool = False
    """Whether the server is a Tokentape gateway."""


class _Meta(msgspec.Struct):
    n_vocab: int = 0
    n_embd: int | None = None


class Card(msgspec.Struct):
    """A model that a server lists."""

    id: str
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
    """For an adapter, the name of its base model."""
    max_model_len: int | None = None
    meta: _Meta | None = None

    @property
    def context(self) -> int:
        """The context length in tokens. Raises `EngineContractError` if the server does not report it."""
        if self.max_model_len is None:
            raise EngineContractError("the engine does not report its context length (max_model_len) in /v1/models")
        return self.max_model_len


class _Cards(msgspec.Struct):
    data: list[Card]


async def served_cards(http: HttpClient, *, stage: Stage = "first_token") -> list[Card]:
    """Return the models that `/v1/models` lists, within the timeout of `stage`.

    Raises `EngineError` or a subclass, also if no model is listed.
    """
    body = await http.get("/v1/models", stage=stage)
    try:
        cards = decode(body, _Cards, "an engine").data
    except EngineContractError as error:
        raise EngineContractError(f"{error}; expected the http://host:port of an inference server") from None
    if not cards:
        raise EngineContractError("the engine lists no model at /v1/models; expected at least one")
    return cards


async def process_start(http: HttpClient) -> str | None:
    """Return when the server's process started, from its metrics; None if they don't show it."""
    try:
        match = re.search(rb"^process_start_time_seconds (\S+)", await http.get("/metrics"), re.MULTILINE)
    except (EngineError, InvalidRequest):
        return None
    return match and match[1].decode()


def refuse_gateway(served: ServedAs) -> None:
    """Raise `InvalidRequest` if the server is a Tokentape gateway, which would record the same calls again."""
    if served.by_gateway:
        raise InvalidRequest(
            "this is the URL of a Tokentape gateway, not of an engine; pass the engine's own URL", "engine_url"
        )


def chosen(cards: Sequence[Card], name: str | None) -> Card:
    """Return the model with this name. Without a name, return the first: adapters are listed after it.

    Raises `InvalidRequest` if no model has the name.
    """
    for card in cards:
        if name in (None, card.id):
            return card
    served = ", ".join(card.id for card in cards)
    raise InvalidRequest(f"the engine does not serve {name}; it serves {served}: choose one of these", "model")


async def listed_as(http: HttpClient, *, stage: Stage = "first_token") -> ServedAs:
    """Return the facts from `/v1/models`, within the timeout of `stage`. Raises `EngineError` or a subclass."""
    listed = await served_cards(http, stage=stage)
    cards = [card for card in listed if card.parent is None]
    return ServedAs(
        ids=frozenset(card.id for card in listed),
        names=frozenset(name for card in cards for name in (card.id, card.root) if name),
        max_model_len=next((card.max_model_len for card in cards if card.max_model_len), None),
        hidden_size=next((card.meta.n_embd for card in cards if card.meta is not None), None),
        by_gateway=any(card.owned_by == "tokentape" for card in listed),
    )


async def offered_routes(http: HttpClient) -> list[str]:
    """Return vLLM's token id routes that the server has: the paths where it refuses an empty body."""
    routes = []
    for path in _ROUTES:
        try:
            await attempt(http.post(path, b"{}", {}))
        except InvalidRequest:
            routes.append(path)
    return routes
