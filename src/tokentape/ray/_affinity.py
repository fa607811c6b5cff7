"""Session affinity in Ray Serve: route the calls of a session to one replica, as long as it exists.

This saves reading the session from the database; correctness does not depend on it. Ray Serve's consistent hashing only
reads the session from the header `X-Session-Id`. This router also reads it from the path or a session key.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from urllib.parse import unquote

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica
from starlette.datastructures import Headers

from tokentape.gateway._keys import IDEMPOTENCY_HEADER, SESSION_HEADER, key_in, may_be_session_id, session_in_key

_IN_PATH = re.compile(r"/sessions/([^/]+)(?:/|$)")


class SessionRouter(ConsistentHashRouter):  # type: ignore[misc] # Ray is not typed
    """Choose the replica by `affinity_key`, or at random if a request has no key."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica for the request's session, then the replicas to try if it is full."""
        if pending_request is not None and pending_request.metadata.is_http_request:
            # Serve's proxy sends the ASGI scope in the pickled first argument.
            (pickled,) = pending_request.args or (None,)
            if isinstance(pickled, bytes):
                scope = pickle.loads(pickled).asgi_scope
                pending_request.metadata.session_id = affinity_key(scope["path"], scope["headers"]) or ""
        ranked: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        return ranked


def affinity_key(path: str, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return a call's session id, else its Idempotency-Key, else None. Calls with equal keys go to one replica."""
    texts = Headers({name.decode("latin-1"): value.decode("latin-1") for name, value in headers})
    in_path = _IN_PATH.search(path)
    for session_id in (in_path and unquote(in_path[1]), texts.get(SESSION_HEADER), session_in_key(key_in(texts))):
        if session_id and may_be_session_id(session_id):
            return session_id
    # A retry goes to the replica where the call may still be running.
    return texts.get(IDEMPOTENCY_HEADER) or None
