"""The OpenAPI document of the gateway, served at /openapi.json.

Request bodies are described by the Structs that read them. Replies of the wire APIs are what their own documentation
says; here stands their media type only. A new wire API is one line in `WIRE_APIS`, another endpoint one in `RESOURCES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape.gateway.engine_routes import Pause, Resume
from tokentape.gateway.feedback import BINARY, NewColumns, NewReward
from tokentape.gateway.http import encode_json
from tokentape.gateway.sessions import MAX_PAGE, PARQUET, NewSession
from tokentape.gateway.snapshots import JSON_LINES, Confirmation, NewSnapshot
from tokentape.gateway.wire import anthropic_messages, chat_completions, completions, responses
from tokentape.gateway.wire.anthropic_messages import COUNT_PATH, AnthropicMessages, MessagesBody
from tokentape.gateway.wire.chat_completions import ChatCompletions, ChatCompletionsBody
from tokentape.gateway.wire.completions import Completions, CompletionsBody
from tokentape.gateway.wire.responses import Responses, ResponsesBody
from tokentape.gateway.wire.vllm_paths import DetokenizeBody, TokenizeBody
from tokentape.version import __version__
from tokentape.viewer import routes as viewer
from tokentape.viewer.binary import MEDIA_TYPE as PACKED
from tokentape.viewer.comparing import AGAINST

PATH = "/openapi.json"

_JSON = "application/json"
_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint."""

    method: str
    path: str
    summary: str
    body: type[Struct] | None = None
    body_required: bool = True
    binary_body: bool = False
    """The body may be bytes instead of JSON."""
    more_fields: frozenset[str] = frozenset()
    """Fields of the body that are accepted besides those of the Struct."""
    status: int = 200
    media: tuple[str, ...] = (_JSON,)
    query: Mapping[str, Any] = field(default_factory=dict)
    """Schemas of the query's parameters."""
    below_sessions: bool = False
    """Served below /sessions/{session_id} as well."""


def _wire(path: str, body: type[Struct], more_fields: frozenset[str], summary: str) -> Operation:
    media = (_JSON, _STREAM)
    return Operation("post", path, summary, body, more_fields=more_fields, media=media, below_sessions=True)


WIRE_APIS = (
    _wire(ChatCompletions.path, ChatCompletionsBody, chat_completions.IGNORED, "OpenAI's chat completions"),
    _wire(Completions.path, CompletionsBody, completions.IGNORED, "OpenAI's completions"),
    _wire(Responses.path, ResponsesBody, responses.IGNORED, "OpenAI's Responses"),
    _wire(AnthropicMessages.path, MessagesBody, anthropic_messages.IGNORED, "Anthropic's Messages"),
)

_WHOLE_NUMBER = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
_PAGE = {"limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}, "after": _WHOLE_NUMBER}
_SESSION = "/sessions/{session_id}"
_SNAPSHOT = "/snapshots/{snapshot_id}"
_COUNTED = anthropic_messages.IGNORED

RESOURCES = (
    Operation("get", Responses.path + "/{response_id}", "A recorded response", below_sessions=True),
    Operation("post", COUNT_PATH, "Count a context's tokens", MessagesBody, more_fields=_COUNTED, below_sessions=True),
    Operation("get", "/sessions", "List sessions", query=_PAGE),
    Operation("post", "/sessions", "Create a session", NewSession, False, status=201),
    Operation("get", _SESSION, "A session's tree of turns, its leaves and rewards"),
    Operation("delete", _SESSION, "Delete a session and its record", status=204, media=()),
    Operation(
        "get",
        _SESSION + "/trajectories",
        "A session's trajectories",
        media=(_JSON, PARQUET),
        query={"leaf": _WHOLE_NUMBER, "verdict": {"type": "string"}, "wait_checks": _WHOLE_NUMBER},
    ),
    Operation(
        "get",
        _SESSION + "/media/{sha256}",
        "An image of a session as received, or the settings it was processed with",
        media=("image/png", "image/jpeg", "image/webp", "image/gif", _JSON),
    ),
    Operation("post", _SESSION + "/reward", "Give a session, a path or a turn a reward", NewReward, status=201),
    Operation(
        "post",
        _SESSION + "/columns",
        "Give tokens named values",
        NewColumns,
        status=201,
        query={"name": {"type": "string"}, "turn": _WHOLE_NUMBER, "leaf": _WHOLE_NUMBER},
        binary_body=True,
    ),
    Operation("post", "/snapshots", "Take a snapshot of sessions", NewSnapshot, False, status=201),
    Operation("get", "/snapshots", "List snapshots"),
    Operation("get", _SNAPSHOT, "A snapshot"),
    Operation("delete", _SNAPSHOT, "Release a snapshot", query={"drop_sessions": {"type": "boolean"}}),
    Operation("get", _SNAPSHOT + "/trajectories", "A snapshot's trajectories", media=(JSON_LINES, PARQUET)),
    Operation("post", _SNAPSHOT + "/confirm", "Say that a snapshot is safe elsewhere", Confirmation),
    Operation("get", "/v1/models", "The model that is served", below_sessions=True),
    Operation("post", "/tokenize", "A text's token ids", TokenizeBody, below_sessions=True),
    Operation("post", "/detokenize", "The text of token ids", DetokenizeBody, below_sessions=True),
    Operation("get", "/version", "The gateway's version", below_sessions=True),
    Operation("get", "/health", "Whether turns can be taken now, under vLLM's path", below_sessions=True),
    Operation("get", "/readyz", "Whether turns can be taken now"),
    Operation("get", "/healthz", "Whether the process answers"),
    Operation("get", "/engine", "What samples"),
    Operation("post", "/engine/pause", "Close the gate in front of the engine", Pause, False),
    Operation("post", "/engine/resume", "Open the gate in front of the engine", Resume, False),
    Operation("get", "/metrics", "Metrics for Prometheus", media=("text/plain", "application/openmetrics-text")),
    Operation("get", PATH, "This document"),
    Operation("get", "/", "To the viewer", status=307, media=()),
    Operation("get", viewer.PAGE, "The viewer, a page", media=("text/html",)),
    Operation("get", viewer.PAGE + "/static/{name}", "What the page is made of", media=("text/css", "text/javascript")),
    Operation("get", viewer.API + "/about", "What the viewer shows, and what it can't"),
    Operation("get", viewer.API + "/overview", "Values of all metrics"),
    Operation("get", viewer.API + "/drift", "Measure the drift of sessions", query={"ids": {"type": "string"}}),
    Operation("get", viewer.API + "/sessions", "Search, filter and sort sessions", query=viewer.LISTING_QUERY),
    Operation("get", viewer.SESSION, "A session's tree of turns and its leaves"),
    Operation("get", viewer.LEAF, "A trajectory as packed arrays", media=(PACKED,), query={"from": _WHOLE_NUMBER}),
    Operation(
        "get",
        viewer.LEAF + "/comparison",
        "A trajectory beside what retokenizing or rendering again would have made of it, as packed arrays",
        media=(PACKED,),
        query={"with": {"type": "string", "enum": list(AGAINST)}},
    ),
)

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "code": {"type": ["string", "null"]},
                "param": {"type": ["string", "null"]},
            },
        }
    },
}

_PATH_PARAMETERS = {
    "session_id": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    "response_id": {"type": "string"},
    "snapshot_id": _WHOLE_NUMBER,
    "leaf": _WHOLE_NUMBER,
    "name": {"type": "string"},
}


@cache
def document() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    operations = [*WIRE_APIS, *RESOURCES]
    bodies = list(dict.fromkeys(operation.body for operation in operations if operation.body is not None))
    references, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    reference_of = dict(zip(bodies, references, strict=True))
    for operation in operations:
        if operation.body is not None:
            schema = schemas[reference_of[operation.body]["$ref"].rpartition("/")[2]]
            schema["properties"] |= {name: {} for name in sorted(operation.more_fields)}
            # What is not known is refused.
            schema["additionalProperties"] = False
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        reference = None if operation.body is None else reference_of[operation.body]
        for prefix in ("", _SESSION) if operation.below_sessions else ("",):
            paths.setdefault(prefix + operation.path, {})[operation.method] = _written(operation, prefix, reference)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tokentape gateway",
            "version": __version__,
            "description": "Wire APIs for agents, and the record of what was sampled for them.",
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # The empty one: a gateway without keys takes none.
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def routes() -> list[Route]:
    """The endpoint. It says nothing that the documentation doesn't, so it takes no key."""

    async def show(request: Request) -> Response:
        return Response(encode_json(document()), media_type=_JSON)

    return [Route(PATH, show, methods=["GET"])]


def _written(operation: Operation, prefix: str, body: Any) -> dict[str, Any]:
    path = prefix + operation.path
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name, schema in _PATH_PARAMETERS.items()
        if f"{{{name}}}" in path
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()]
    if operation in WIRE_APIS:
        parameters += [
            {"name": name, "in": "header", "schema": {"type": "string"}} for name in ("X-Session-Id", "Idempotency-Key")
        ]
    done: dict[str, Any] = {"description": operation.summary}
    if operation.media:
        done["content"] = {media: {} for media in operation.media}
    error = {"content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    written: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": parameters,
        "responses": {str(operation.status): done, "default": {"description": "An error", **error}},
    }
    if body is not None:
        content: dict[str, Any] = {_JSON: {"schema": body}}
        if operation.binary_body:
            content[BINARY] = {}
        written["requestBody"] = {"required": operation.body_required, "content": content}
    return written
