"""Talk to a running gateway: sessions for agents, rewards, trajectories as numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self
from urllib.parse import quote

import httpx2
import msgspec

from tokentape.errors import Conflict, GatewayUnavailable, InvalidRequest, TokentapeError
from tokentape.session.jsonl import trajectory_from_json
from tokentape.types import Trajectory


class Client:
    """A gateway at `base_url`. One client may be shared by threads; it is a context manager that closes it.

    >>> client = tokentape.Client("http://127.0.0.1:8800")                          # doctest: +SKIP
    >>> session = client.session(metadata={"task": 7})                              # doctest: +SKIP
    >>> agent = OpenAI(base_url=session.base_url, api_key="none")                   # doctest: +SKIP
    >>> agent.chat.completions.create(model="any", messages=[...])                  # doctest: +SKIP
    >>> session.reward(1.0)                                                         # doctest: +SKIP
    >>> session.trajectories()[0].token_ids                                         # doctest: +SKIP
    array([...], dtype=int32)

    All methods raise the error of `tokentape.errors` that the gateway answered with, and `GatewayUnavailable` if it
    can't be reached or did not answer within `timeout` seconds.
    """

    def __init__(self, base_url: str = "http://127.0.0.1:8800", *, timeout: float = 60.0) -> None:
        self.base_url = base_url.rstrip("/")
        self._http = httpx2.Client(base_url=self.base_url, timeout=timeout)

    def session(self, session_id: str | None = None, metadata: Mapping[str, Any] | None = None) -> ClientSession:
        """Create a session, with a random id if none is given.

        A session that exists already is taken up where it is; giving `metadata` for one raises `Conflict`.
        """
        asked = {"session_id": session_id, "metadata": None if metadata is None else dict(metadata)}
        try:
            created = self._call("POST", "/sessions", asked)
        except Conflict:
            if session_id is None or metadata is not None:
                raise
            return ClientSession(self, session_id)
        return ClientSession(self, created["session_id"])

    def sessions(self) -> Iterator[dict[str, Any]]:
        """Every session in order of creation: `session_id`, `created_at`, `metadata` and counts of turns and tokens.

        Pages are fetched as they are needed.
        """
        after: int | None = 0
        while after is not None:
            page = self._call("GET", f"/sessions?after={after}")
            yield from page["data"]
            after = page["next_after"]

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that the gateway answers with; None if it answers with nothing."""
        content = None if body is None else msgspec.json.encode(body)
        headers = None if body is None else {"content-type": "application/json"}
        try:
            response = self._http.request(method, path, content=content, headers=headers)
        except httpx2.RequestError as error:
            kind = type(error).__name__
            raise GatewayUnavailable(
                f"no answer from the gateway at {self.base_url} ({kind}); is it running?"
            ) from error
        try:
            answer = msgspec.json.decode(response.content) if response.content else None
        except ValueError:
            answer = None
        if response.is_success:
            return answer
        raise _error(response.status_code, answer)


class ClientSession:
    """One session of a gateway. Made by `Client.session`."""

    def __init__(self, client: Client, session_id: str) -> None:
        self._client = client
        self._path = f"/sessions/{quote(session_id, safe='')}"
        self.session_id = session_id
        self.base_url = f"{client.base_url}{self._path}/v1"
        """What to give an agent's OpenAI client as its base URL."""

    def reward(self, value: float, turn: int | None = None) -> None:
        """Give the session, or one of its turns, a reward. The last one given counts."""
        self._client._call("POST", f"{self._path}/reward", {"value": float(value), "turn": turn})

    def info(self) -> dict[str, Any]:
        """The session's tree: `turns` (seq, parent, fork, counts...), `leaves` with verdicts, `rewards`, `metadata`."""
        found: dict[str, Any] = self._client._call("GET", self._path)
        return found

    def trajectories(self) -> list[Trajectory]:
        """One trajectory per leaf; over all of them each sampled token is trained once."""
        found = self._client._call("GET", f"{self._path}/trajectories")
        return [trajectory_from_json(one) for one in found["data"]]

    def delete(self) -> None:
        """Delete the session and everything recorded of it."""
        self._client._call("DELETE", self._path)

    def __repr__(self) -> str:
        return f"ClientSession({self.session_id!r})"


def _error(status: int, answer: Any) -> TokentapeError:
    """The error that a gateway's answer tells of: by its code, else by its status."""
    told = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(told, dict):
        return GatewayUnavailable(f"status {status} without an error of Tokentape's; is there a gateway at this URL?")
    kinds = {kind.code: kind for kind in _tree(TokentapeError)}
    kind = kinds.get(str(told.get("code")), TokentapeError)
    message = str(told.get("message"))
    return kind(message, told.get("param")) if issubclass(kind, InvalidRequest) else kind(message)


def _tree(kind: type[TokentapeError]) -> Iterator[type[TokentapeError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _tree(below)
