"""Talk to a running gateway: sessions for agents, rewards, trajectories as numpy arrays, snapshots."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import httpx2
import msgspec
import numpy as np
import numpy.typing as npt

from tokentape.durable import flush_directory
from tokentape.errors import Conflict, GatewayUnavailable, InvalidRequest, TokentapeError
from tokentape.session.arrow import iter_parquet
from tokentape.session.jsonl import json_line, trajectory_from_json
from tokentape.types import Trajectory, TurnColumn

if TYPE_CHECKING:
    from tokentape.audit.scoring import ScoreReport


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

    def __init__(
        self, base_url: str = "http://127.0.0.1:8800", *, api_key: str | None = None, timeout: float = 60.0
    ) -> None:
        self.base_url = base_url.rstrip("/")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._timeout = timeout
        self._http = httpx2.Client(base_url=self.base_url, timeout=timeout, headers=headers)

    def session(
        self,
        session_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        pin: Mapping[str, Any] | None = None,
        default: Mapping[str, Any] | None = None,
    ) -> ClientSession:
        """Create a session, with a random id if none is given.

        `pin` are sampling parameters that no call in it can change, {"temperature": 1.0} for example, `default` those
        of calls that don't name them. A session that exists already is taken up where it is; giving anything else for
        one raises `Conflict`.
        """
        given = {"metadata": metadata, "pin": pin, "default": default}
        asked = {"session_id": session_id, **{name: dict(one) for name, one in given.items() if one is not None}}
        try:
            created = self._call("POST", "/sessions", asked)
        except Conflict:
            if session_id is None or len(asked) > 1:
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

    def take_snapshot(
        self,
        session_ids: Iterable[str] | None = None,
        *,
        since: int | None = None,
        idle_seconds: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait_checks: int = 10,
    ) -> ClientSnapshot:
        """Freeze sessions as they are: those to which all that is given applies, else all that this key may see.

        `since` leaves out what has not changed since an earlier snapshot, or one that it was itself taken since;
        `idle_seconds` what had a turn in so many seconds; `metadata` what has other values under these keys. Up to
        `wait_checks` seconds go by until the bridges that are due are checked. Raises `InvalidRequest` if nothing is
        left.
        """
        asked = {
            "session_ids": None if session_ids is None else list(session_ids),
            "since": since,
            "idle_seconds": idle_seconds,
            "metadata": None if metadata is None else dict(metadata),
            "wait_checks": wait_checks,
        }
        taken = self._call("POST", "/snapshots", asked, wait=wait_checks)
        return ClientSnapshot(self, taken["snapshot_id"])

    def score(
        self,
        engine: str,
        url: str | None = None,
        *,
        model: str | Path,
        column: str = "sampler_logprobs",
        precision: str | None = None,
        session_ids: Iterable[str] | None = None,
        again: bool = False,
        concurrency: int = 4,
        engine_model: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> ScoreReport:
        """Score recorded ids with an engine that this process opens, and keep the scores as a column per token.

        `engine` is `vllm` or `sglang` at `url`, or `transformers` here, with the weights in the folder `model`; that
        folder has the record's tokenizer in any case. The scores are the model's own log-probabilities, at temperature
        1, before penalties and truncation; `ClientSession.trajectories` returns them in `columns`. Turns that have the
        column are left alone unless `again`. With `precision`, `float32` or `bfloat16`, the lower one of both engines,
        what was recorded is compared, and `causes` of the report says why it is too far off, if it is.
        `concurrency` is how many sessions are scored at a time. Raises as the engines do.

        >>> report = client.score("vllm", "http://127.0.0.1:8000", model="path/to/model")    # doctest: +SKIP
        """
        from tokentape.audit.scoring import Recorded, open_and_score

        found = (session["session_id"] for session in self.sessions()) if session_ids is None else session_ids

        def recorded() -> Iterator[Recorded]:
            for session_id in found:
                trajectories = ClientSession(self, session_id).trajectories()
                done = () if again else _turns_with(trajectories, column)
                yield Recorded(session_id, trajectories, done, {})

        async def write(columns: Sequence[TurnColumn]) -> None:
            for one in columns:
                session = ClientSession(self, one.session_id)
                await asyncio.to_thread(session.annotate, one.name, one.values, turn=one.turn)

        asked: dict[str, Any] = {"column": column, "precision": precision, "concurrency": concurrency}
        asked |= {"engine_model": engine_model, "options": options}
        return asyncio.run(open_and_score(recorded(), write, engine, model, url, **asked))

    def engine(self) -> dict[str, Any]:
        """What samples: `engine`, `model`, `paused`, `calls_under_way`, `weight_version`, `replicas`..."""
        found: dict[str, Any] = self._call("GET", "/engine")
        return found

    def pause(self, *, abort: bool = False, timeout: float = 60.0) -> bool:
        """Hold new calls back while weights change, and wait up to `timeout` seconds for those under way.

        With `abort` they are ended, and go on when sampling does, if the gateway's `on_abort` says so. Returns whether
        none is left. Takes an admin key.
        """
        body = {"mode": "abort" if abort else "wait", "timeout": timeout}
        return bool(self._call("POST", "/engine/pause", body, wait=timeout)["idle"])

    def resume(self, weight_version: str | None = None) -> None:
        """Let calls go on; `weight_version` names the weights that sample from now on. Takes an admin key."""
        self._call("POST", "/engine/resume", {"weight_version": weight_version})

    def snapshot(self, snapshot_id: int) -> ClientSnapshot:
        """A snapshot that was taken before. Nothing is asked of the gateway yet."""
        return ClientSnapshot(self, snapshot_id)

    def snapshots(self) -> list[dict[str, Any]]:
        """All snapshots, oldest first: `snapshot_id`, `state`, `digest`, counts."""
        found: list[dict[str, Any]] = self._call("GET", "/snapshots")["data"]
        return found

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, path: str, body: Any = None, *, wait: float = 0.0) -> Any:
        """The JSON that the gateway answers with; None if it answers with nothing. `body` is JSON unless bytes.

        The answer may take `wait` seconds longer than others.
        """
        content = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        headers = None if body is None else {"content-type": kind}
        with self._reached():
            response = self._http.request(method, path, content=content, headers=headers, timeout=self._timeout + wait)
        if response.is_success:
            return _json(response)
        raise _error(response.status_code, _json(response))

    @contextmanager
    def _streamed(self, path: str, accept: str) -> Iterator[httpx2.Response]:
        """The answer to a GET whose body has not been read yet."""
        with self._reached(), self._http.stream("GET", path, headers={"accept": accept}) as response:
            if not response.is_success:
                response.read()
                raise _error(response.status_code, _json(response))
            yield response

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except httpx2.RequestError as error:
            kind = type(error).__name__
            raise GatewayUnavailable(
                f"no answer from the gateway at {self.base_url} ({kind}); is it running?"
            ) from error


class ClientSession:
    """One session of a gateway. Made by `Client.session`."""

    def __init__(self, client: Client, session_id: str) -> None:
        self._client = client
        self._path = f"/sessions/{quote(session_id, safe='')}"
        self.session_id = session_id
        self.base_url = f"{client.base_url}{self._path}/v1"
        """What to give an agent's OpenAI client as its base URL."""

    @property
    def api_key(self) -> str:
        """A key that opens this session and no other, for agents that can be given a key but no base URL of their own.

        The agent's base URL is then the gateway's, up to and including `/v1`.
        """
        return str(self.info()["api_key"])

    def reward(self, value: float, *, turn: int | None = None, leaf: int | None = None) -> None:
        """Give a reward to the session, to one turn's action, or to the whole path that ends with a leaf.

        A trajectory's `reward` is its leaf's, else the session's; `turn_rewards` are those of its turns. The last one
        given counts.
        """
        self._client._call("POST", f"{self._path}/reward", {"value": float(value), "turn": turn, "leaf": leaf})

    def annotate(
        self, name: str, values: npt.ArrayLike, *, turn: int | None = None, leaf: int | None = None
    ) -> list[int]:
        """Attach a named number to each token: advantages, values, weights. Returns the turns that have them now.

        With `turn` one per sampled token of that turn, or one per token that it added and sampled. With `leaf` one per
        token of that trajectory, of which those of turns that an earlier trajectory trains are left alone. They are
        kept as float32 and come back in `Trajectory.columns`. The last ones given for a turn count.

        >>> session.annotate("advantages", advantages, leaf=trajectory.leaf)            # doctest: +SKIP
        """
        numbers = np.asarray(values, "<f4")
        if numbers.ndim != 1:
            raise InvalidRequest(f"values must be one number per token, not {numbers.ndim}-dimensional", "values")
        place = {"turn": turn, "leaf": leaf}
        query = "&".join(f"{key}={int(number)}" for key, number in place.items() if number is not None)
        path = f"{self._path}/columns?name={quote(name, safe='')}&{query}"
        written: list[int] = self._client._call("POST", path, numbers.tobytes())["turns"]
        return written

    def info(self) -> dict[str, Any]:
        """The session's tree: `turns` (seq, parent, fork, counts...), `leaves` with verdicts, `aborted`, `rewards`."""
        found: dict[str, Any] = self._client._call("GET", self._path)
        return found

    def trajectories(self, verdict: Collection[str] | None = None, *, wait_checks: int = 10) -> list[Trajectory]:
        """One trajectory per leaf; over all of them each sampled token is trained once.

        The gateway answers once it has checked the bridges that are due, or after `wait_checks` seconds; verdicts say
        `bridge unchecked` then.

        `verdict` leaves out those with another one: `["exact", "forked:sibling"]`; `forked` stands for every fork.
        Masks don't change with it: what a trajectory that is left out trains, no other one does.
        """
        query = f"?wait_checks={int(wait_checks)}"
        if verdict is not None:
            query += f"&verdict={quote(','.join(verdict), safe='')}"
        found = self._client._call("GET", f"{self._path}/trajectories{query}", wait=wait_checks)
        return [trajectory_from_json(one) for one in found["data"]]

    def media(self, sha256: str) -> bytes:
        """An image of the session as it was received, or the settings that images were processed with.

        `Trajectory.media` names both by their hash.
        """
        with self._client._streamed(f"{self._path}/media/{quote(sha256, safe='')}", "*/*") as response:
            return response.read()

    def delete(self) -> None:
        """Delete the session and everything recorded of it."""
        self._client._call("DELETE", self._path)

    def __repr__(self) -> str:
        return f"ClientSession({self.session_id!r})"


class ClientSnapshot:
    """One snapshot of a gateway. Made by `Client.take_snapshot` and `Client.snapshot`.

    >>> snapshot = client.take_snapshot(idle_seconds=600)                           # doctest: +SKIP
    >>> digest = snapshot.save("batch.jsonl")                                       # doctest: +SKIP
    >>> snapshot.confirm(digest)                                                    # doctest: +SKIP
    >>> snapshot.drop()["kept"]                                                     # doctest: +SKIP
    """

    def __init__(self, client: Client, snapshot_id: int) -> None:
        self._client = client
        self._path = f"/snapshots/{snapshot_id}"
        self.snapshot_id = snapshot_id

    def manifest(self) -> dict[str, Any]:
        """What is in it: `digest`, counts, `verdicts`, `columns`, and per session its turns and leaves."""
        found: dict[str, Any] = self._client._call("GET", self._path)
        return found

    def trajectories(self) -> Iterator[Trajectory]:
        """The contents, as they come, the same each time. Nothing vouches for their digest: see `save`."""
        with self._client._streamed(f"{self._path}/trajectories", _JSON_LINES) as response:
            for line in response.iter_lines():
                yield trajectory_from_json(msgspec.json.decode(line))

    def save(self, path: str | Path) -> str:
        """Write the contents to a file, check them, flush them to the disk, and return their digest.

        JSON lines for a name that ends with `.jsonl`, else Parquet. The file appears under its name once it is whole
        and durable. Raises `GatewayUnavailable` if what came is not what the gateway said would come.
        """
        path = Path(path)
        part = path.with_name(path.name + ".part")
        lines = path.suffix == ".jsonl"
        try:
            with open(part, "wb") as file:
                with self._client._streamed(f"{self._path}/trajectories", _JSON_LINES if lines else _PARQUET) as answer:
                    told = answer.headers["x-tokentape-digest"]
                    for chunk in answer.iter_bytes():
                        file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            digest = hashlib.sha256()
            for line in _lines_of(part, lines):
                digest.update(line)
            if digest.hexdigest() != told:
                raise GatewayUnavailable(
                    f"what came of snapshot {self.snapshot_id} has digest {digest.hexdigest()}, not {told}; "
                    "get it again"
                )
            os.replace(part, path)
            flush_directory(path.parent)
        finally:
            part.unlink(missing_ok=True)
        return told

    def confirm(self, digest: str) -> None:
        """Say that the contents are safe elsewhere: their sessions may be deleted from now on.

        `digest` is the SHA-256 of what was received, as JSON lines; `save` returns it. Raises `Conflict` if it is
        another one.
        """
        self._client._call("POST", f"{self._path}/confirm", {"digest": digest})

    def drop(self) -> dict[str, Any]:
        """Delete the sessions of a confirmed snapshot from the gateway, for ever; then it is released.

        Returns `dropped`, their ids, and `kept`: which were left and why, such as those that have changed since. Raises
        `Conflict` for a snapshot that is not confirmed.
        """
        report: dict[str, Any] = self._client._call("DELETE", f"{self._path}?drop_sessions=true")
        return report

    def release(self) -> None:
        """Keep nothing for it any more; its sessions stay."""
        self._client._call("DELETE", self._path)

    def __repr__(self) -> str:
        return f"ClientSnapshot({self.snapshot_id})"


def _turns_with(trajectories: Iterable[Trajectory], column: str) -> set[int]:
    """The turns that have a column: its values are not NaN where the turn is trained."""
    found = set()
    for one in trajectories:
        for turn, start, end in zip(one.turns, one.completion_starts, one.completion_ends, strict=True):
            trained = one.loss_mask[start:end].all()
            if trained and column in one.columns and not np.isnan(one.columns[column][start:end]).any():
                found.add(turn)
    return found


_JSON_LINES = "application/jsonl"
_PARQUET = "application/vnd.apache.parquet"


def _lines_of(path: Path, jsonl: bool) -> Iterator[bytes]:
    """The lines of JSONL that a file holds, or those that its trajectories would be."""
    if jsonl:
        with open(path, "rb") as file:
            yield from file
    else:
        yield from map(json_line, iter_parquet(path))


def _json(response: httpx2.Response) -> Any:
    try:
        return msgspec.json.decode(response.content) if response.content else None
    except ValueError:
        return None


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
