"""What a wire API is: a `Dialect` decodes request bodies to turn requests, and its `Encoder` writes the replies."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Generic, TypeVar

from msgspec import Struct
from starlette.requests import Request

from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import EngineInfo, SampleDelta
from tokentape.errors import TokentapeError
from tokentape.gateway._access import RequestLog
from tokentape.gateway._events import TurnDelta, TurnDone, TurnEvent, TurnRequest, TurnStarted
from tokentape.gateway._http import encode_event, error_body
from tokentape.types import Message, Turn

_Body = TypeVar("_Body")


class DoneChoice(Struct, frozen=True):
    """One finished choice: its sampled deltas and its recorded turn."""

    done: TurnDone
    sampled: Sequence[SampleDelta]


class Encoder(Generic[_Body]):
    """Writes the replies to one request in the format of a wire API.

    For a whole reply, use content and calls in `TurnDone.turn.reply`. For a stream, use deltas and `TurnDone.rest`.
    """

    def __init__(self, dialect: Dialect, body: _Body, ignored: Sequence[str], started: TurnStarted) -> None:
        self._dialect, self._body, self._ignored = dialect, body, ignored
        self._tokenizer, self._reply_id, self._prompt_ids = dialect.tokenizer, started.reply_id, started.prompt_ids

    def whole(self, choices: Sequence[DoneChoice]) -> Any:
        """Return the JSON value of the reply to a request without `stream`."""
        raise NotImplementedError

    def begin(self) -> Iterable[bytes]:
        """Return the server-sent events before the first token."""
        return ()

    def grow(self, event: TurnDelta | TurnDone) -> Iterable[bytes]:
        """Return the server-sent events for what `event` adds to its choice."""
        raise NotImplementedError

    def end(self, done: Sequence[TurnDone]) -> Iterable[bytes]:
        """Return the server-sent events after the commit. `done` is ordered by choice."""
        raise NotImplementedError

    def failed(self, error: TokentapeError) -> bytes:
        """Return what ends the stream after an error."""
        return encode_event(self._dialect.error_body(error))

    async def stream(
        self, event: TurnEvent | None, events: AsyncGenerator[TurnEvent], line: RequestLog
    ) -> AsyncGenerator[bytes]:
        """Yield the server-sent events for `event`, the first after `TurnStarted`, and for the `events` after it.

        Add their turns, and the error if one is raised, to the request's log line.
        """
        done: list[TurnDone] = []
        try:
            async with aclosing(events):
                for chunk in self.begin():
                    yield chunk
                while event is not None:
                    assert not isinstance(event, TurnStarted)
                    if isinstance(event, TurnDone):
                        line.turns.append(event.turn.seq)
                        done.append(event)
                    for chunk in self.grow(event):
                        yield chunk
                    event = await anext(events, None)
        except TokentapeError as error:
            line.error = error.code
            raise
        for chunk in self.end(sorted(done, key=lambda choice: choice.choice)):
            yield chunk

    def _recorded(self, turn: Turn) -> dict[str, Any]:
        """Return the field `tokentape` of replies: the recorded turn, and the ignored parameters."""
        where = {"session_id": turn.session_id, "turn": turn.seq}
        return {**where, "ignored_params": list(self._ignored)} if self._ignored else where


class DecodedRequest(Struct, frozen=True):
    """A request as a wire API decoded it."""

    turn: TurnRequest
    encoder: Callable[[TurnStarted], Encoder[Any]]
    ignored: tuple[str, ...] = ()
    """Accepted parameters that have no effect, as listed in the header `X-Tokentape-Ignored-Params`."""


class RequestContext(Struct, frozen=True):
    """Data that a wire API may need to decode a body."""

    session_id: str
    engine: EngineInfo
    vocab_size: int
    """Ids greater than or equal to this are not accepted."""
    takes_images: bool
    conversation: Callable[[str], Awaitable[tuple[Message, ...]]]
    """Returns the messages up to and including an earlier reply of the session. Raises `NotFound`."""
    reads_kwarg: Callable[[str], bool]
    """Returns whether the chat template may read this variable of `chat_template_kwargs`."""
    enforces_tools: bool = False
    """Whether forced tool choices and strict tools are enforced or refused, instead of only reported."""


class Dialect:
    """A wire API: decodes its request bodies and encodes its replies.

    `model_id` is the model's name in replies. `tokenizer` gives the text of tokens in replies, and counts them.
    """

    path: str
    """Path below a base URL, for example `/v1/chat/completions`, without placeholders. An API with more paths has a
    dialect for each."""
    summary: str
    """Name of the API in the OpenAPI document."""
    body: type[Struct]
    """Struct with the fields of a request body."""
    ignored: frozenset[str]
    """Additional fields that are accepted and have no effect."""
    lists: tuple[str, ...] = ("messages", "tools")
    """Fields with lists, in which the gateway limits the number of entries."""
    parts: tuple[str, ...] = ("content",)
    """Keys in entries and parts under which further lists of parts are found. The limit includes these."""
    names: ClassVar[Mapping[str, str]] = {
        "json_schema": "response_format",
        "stop_strings": "stop",
        "structural_tag": "tools",
    }
    """Maps parameters that errors name, such as fields of `SamplingParams`, to the API's parameters if they differ."""
    read_messages: Callable[[bytes, RequestContext], tuple[Message, ...]] | None = None
    """Reads the messages of an accepted body.

    None if bodies have no array `messages`, or if the meaning of a message depends on the messages before it.
    """

    def __init__(self, model_id: str, tokenizer: Tokenizer) -> None:
        self.model_id = model_id
        self.tokenizer = tokenizer

    def session_of(self, body: Any) -> str | None:
        """Return the session id in the body; None if the API has no such field or the body doesn't use it."""
        return None

    async def decode(self, body: Any, context: RequestContext) -> DecodedRequest:
        """Decode a body parsed as JSON. Raises `InvalidRequest` or a subclass that names the parameter."""
        raise NotImplementedError

    def claims(self, request: Request) -> bool:
        """Return whether errors for this request, which may have an unknown path, use the API's `error_body`."""
        return self.path in request.url.path

    @staticmethod
    def error_body(error: TokentapeError) -> Any:
        """Return the JSON value of an error response."""
        return error_body(error)
