"""Routes with descriptions, and the OpenAPI document generated from them, served at /openapi.json.

Request body schemas come from the Structs that decode them. For replies of wire APIs the document has only the media
type; see the documentation of those APIs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tokentape._version import __version__
from tokentape.errors import InvalidRequest
from tokentape.gateway._http import encode_json
from tokentape.gateway._keys import KEY_HEADER

PATH = "/openapi.json"
SESSION = "/sessions/{session_id}"

JSON = "application/json"
BINARY = "application/octet-stream"

WHOLE_NUMBER = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
"""Schema of a query or path parameter that is a non-negative integer."""

_PATH_PARAMETERS = {
    "session_id": {"type": "string", "pattern": r"^(?!\.{1,2}$)[A-Za-z0-9._:-]{1,128}$"},
    "response_id": {"type": "string"},
    "model_id": {"type": "string"},
    "snapshot_id": WHOLE_NUMBER,
    "leaf": WHOLE_NUMBER,
    "name": {"type": "string"},
}


class ErrorFields(Struct):
    type: str
    message: str
    code: str | None = None
    param: str | None = None


class Error(Struct):
    """An error response's body."""

    error: ErrorFields


class ApiRoute(Route):
    """A route and its entry in the OpenAPI document.

    `body` is the Struct that decodes the request body, `more_fields` are accepted fields that the Struct lacks. `media`
    lists the reply's media types, `query` maps query parameters to schemas, `headers` lists header parameters. With
    `binary_body` the body may also be bytes. If there is a `query`, other and repeated parameters are refused, because
    a misspelled filter would return everything; except with `any_query`.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Callable[..., Any],
        summary: str,
        *,
        body: type[Struct] | None = None,
        body_required: bool = True,
        binary_body: bool = False,
        more_fields: frozenset[str] = frozenset(),
        status: int = 200,
        media: Sequence[str] = (JSON,),
        query: Mapping[str, Any] | None = None,
        any_query: bool = False,
        headers: Sequence[str] = (),
    ) -> None:
        super().__init__(path, endpoint if any_query or not query else _checked(endpoint, query), methods=[method])
        self.method, self.summary, self.status, self.media = method.lower(), summary, status, media
        self.body, self.body_required, self.binary_body = body, body_required, binary_body
        self.more_fields = more_fields
        text = {"type": "string"}
        schemas = {"path": _PATH_PARAMETERS, "query": query or {}, "header": dict.fromkeys(headers, text)}
        self.parameters = [
            {"name": name, "in": place, "schema": schema, **({"required": True} if place == "path" else {})}
            for place, parameters in schemas.items()
            for name, schema in parameters.items()
            if place != "path" or f"{{{name}}}" in self.path_format
        ]


def _checked(endpoint: Callable[..., Any], allowed: Collection[str]) -> Callable[..., Any]:
    """Return `endpoint`, raising `InvalidRequest` for query parameters that are not `allowed` or are repeated."""

    @wraps(endpoint)
    async def checked(request: Request) -> Response:
        names = [name for name, _ in request.query_params.multi_items()]
        for name in names:
            if name not in allowed:
                raise InvalidRequest(f"there is no parameter {name[:64]!r}; expected {', '.join(allowed)}", name[:64])
            if names.count(name) > 1:
                raise InvalidRequest(f"{name} is in the URL twice; send it once", name)
        response: Response = await endpoint(request)
        return response

    return checked


def also_below_sessions(method: str, path: str, endpoint: Callable[..., Any], summary: str, **more: Any) -> list[Route]:
    """Return a route at `path` and one below /sessions/{session_id}, which can be an agent's base URL."""
    return [ApiRoute(method, prefix + path, endpoint, summary, **more) for prefix in ("", SESSION)]


def document_route(routes: Sequence[BaseRoute]) -> ApiRoute:
    """Return the endpoint that serves the OpenAPI document. It needs no key, because the document is not private."""

    @cache
    def written() -> bytes:
        return encode_json(document([*routes, route]))

    async def show(request: Request) -> Response:
        return Response(written(), media_type=JSON)

    route = ApiRoute("GET", PATH, show, "This document")
    return route


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document for the `ApiRoute`s in `routes`."""
    described = [route for route in routes if isinstance(route, ApiRoute)]
    bodies = list(dict.fromkeys(route.body for route in described if route.body is not None))
    references, schemas = msgspec.json.schema_components([*bodies, Error], ref_template="#/components/schemas/{name}")
    reference_of = dict(zip(bodies, references[:-1], strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in described:
        reference = None if route.body is None else reference_of[route.body]
        if reference is not None:
            schema = schemas[reference["$ref"].rpartition("/")[2]]
            schema["properties"] |= {name: {} for name in sorted(route.more_fields)}
            # The gateway refuses unknown fields.
            schema["additionalProperties"] = False
        paths.setdefault(route.path_format, {})[route.method] = _operation(route, reference)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tokentape gateway",
            "version": __version__,
            "description": "Wire APIs for agents, and the record of the tokens sampled for them.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": KEY_HEADER},
            },
        },
        # The empty entry stands for a gateway without keys.
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(route: ApiRoute, body: Any) -> dict[str, Any]:
    error = {"content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    done: dict[str, Any] = {"description": route.summary}
    if route.media:
        done["content"] = {media: {} for media in route.media}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "parameters": route.parameters,
        "responses": {str(route.status): done, "default": {"description": "An error", **error}},
    }
    if body is not None:
        content = {JSON: {"schema": body}, **({BINARY: {}} if route.binary_body else {})}
        operation["requestBody"] = {"required": route.body_required, "content": content}
    return operation
