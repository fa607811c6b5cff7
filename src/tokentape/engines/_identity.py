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
    """The facts that a server reports about its model. A fact that it does not report is empty or None."""

    ids: frozenset[str]
    """Names of the model and its adapters, for requests."""
    names: frozenset[str]
    """Names without those of adapters, and the paths or Hub names that the weights were loaded from."""
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
        """The length of the context in tokens. Raises `EngineContractError` if the server does not report it."""
        if self.max_model_len is None:
            raise EngineContractError("the engine does not report the length of its context (max_model_len)")
        return self.max_model_len


class _Cards(msgspec.Struct):
    data: list[Card]


class _ModelInfo(msgspec.Struct):
    model_path: str | None = None
    model_type: str | None = None


async def served_cards(http: HttpClient, *, stage: Stage = "first_token") -> list[Card]:
    """Return the models that `/v1/models` lists. Raises `EngineError` or a subclass, also if it lists none.

    The server has the time of `stage`.
    """
    body = await http.get("/v1/models", stage=stage)
    try:
        cards = decode(body, _Cards, "an engine").data
    except EngineContractError as error:
        raise EngineContractError(f"{error}; is this an inference server? Expected its http://host:port") from None
    if not cards:
        raise EngineContractError("the engine lists no model at /v1/models; expected at least one")
    return cards


async def process_start(http: HttpClient) -> str | None:
    """Return when the server's process started, as its metrics say; None if they don't."""
    try:
        match = re.search(rb"^process_start_time_seconds (\S+)", await http.get("/metrics"), re.MULTILINE)
    except (EngineError, InvalidRequest):
        return None
    return match and match[1].decode()


async def refuse_gateway(kind: str, http: HttpClient, *, stage: Stage = "first_token") -> None:
    """Raise `InvalidRequest` if the server is a Tokentape gateway: its record would get the calls of this one too.

    Else raises as `served_as`.
    """
    if (await served_as(kind, http, stage=stage)).by_gateway:
        raise InvalidRequest(
            "this is the address of a Tokentape gateway, not of an engine; give the engine's own address", "engine_url"
        )


def chosen(cards: Sequence[Card], name: str | None) -> Card:
    """Return the model with this name. None returns the first, which is the base model even if adapters are listed.

    Raises `InvalidRequest` if no model has the name.
    """
    for card in cards:
        if name in (None, card.id):
            return card
    served = ", ".join(card.id for card in cards)
    raise InvalidRequest(f"the engine does not serve {name}; it serves {served}: name one of these", "model")


async def served_as(kind: str, http: HttpClient, *, stage: Stage = "first_token") -> ServedAs:
    """Return the facts of `/v1/models`, and of SGLang's `/model_info`. Raises `EngineError` or a subclass.

    The server has the time of `stage`.
    """
    listed = await served_cards(http, stage=stage)
    cards = [card for card in listed if card.parent is None]
    more = _ModelInfo()
    if kind == "sglang":
        answer = await attempt(http.get("/model_info")) or await attempt(http.get("/get_model_info"))
        more = decode(answer, _ModelInfo, "SGLang") if answer is not None else more
    names = {card.id for card in cards} | {card.root for card in cards} | {more.model_path}
    return ServedAs(
        ids=frozenset(card.id for card in listed),
        names=frozenset(name for name in names if name),
        max_model_len=next((card.max_model_len for card in cards if card.max_model_len), None),
        model_type=more.model_type,
        hidden_size=next((card.meta.n_embd for card in cards if card.meta is not None), None),
        by_gateway=any(card.owned_by == "tokentape" for card in listed),
    )


async def offered_routes(http: HttpClient) -> list[str]:
    """Return those of vLLM's routes with ids that the server has: those that refuse an empty body."""
    routes = []
    for path in _ROUTES:
        try:
            await attempt(http.post(path, b"{}", {}))
        except InvalidRequest:
            routes.append(path)
    return routes
