"""The blocking client, for scripts and threads."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx2
import msgspec
import numpy as np
import numpy.typing as npt

from tokentape._durable import durable_file
from tokentape._session.arrow import iter_parquet
from tokentape._session.jsonl import json_line, trajectory_from_json
from tokentape.client import _calls as calls
from tokentape.client._calls import JSON_LINES, PARQUET, Call, Retries, nothing, reader
from tokentape.client._json_values import json_object
from tokentape.client._results import DropReport, EngineState, SessionEntry, SessionState, SnapshotManifest
from tokentape.errors import GatewayUnavailable, InvalidRequest
from tokentape.types import Trajectory, TurnColumn

if TYPE_CHECKING:
    from tokentape.audit._scoring import ScoreReport

T = TypeVar("T")


class Client:
    """Talk to the gateway at `base_url`. Threads may share a client; as a context manager it closes its connections.

    >>> client = tokentape.Client("http://127.0.0.1:8800")                          # doctest: +SKIP
    >>> session = client.session(metadata={"task": 7})                              # doctest: +SKIP
    >>> agent = OpenAI(base_url=session.base_url, api_key="none")                   # doctest: +SKIP
    >>> agent.chat.completions.create(model="any", messages=[...])                  # doctest: +SKIP
    >>> session.reward(1.0)                                                         # doctest: +SKIP
    >>> session.trajectories()[0].token_ids                                         # doctest: +SKIP
    array([...], dtype=int32)

    All methods raise the error from `tokentape.errors` that the gateway returned, and `GatewayUnavailable` if it can't
    be reached or did not answer within `timeout` seconds, including retries. A call that is safe to repeat is retried
    up to `max_retries` times, over about 15 seconds by default, so the gateway may be restarted in between. Errors have
    the response's `retry_after`, in seconds. Raises `InvalidRequest` for an invalid URL, key, timeout
    or number of retries.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8800",
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 5,
    ) -> None:
        self.base_url = str(base_url).rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._max_retries = max_retries
        self._http = httpx2.Client(**calls.http_options(self.base_url, api_key, timeout, max_retries))

    def session(
        self,
        session_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        pin: Mapping[str, Any] | None = None,
        default: Mapping[str, Any] | None = None,
    ) -> ClientSession:
        """Create a session, with a random id by default, or continue an existing session.

        `pin` are sampling parameters that no call in the session can change, for example {"temperature": 1.0};
        `default` are parameters for calls that don't set them. To continue a session, pass only its id: with further
        arguments, an existing session raises `Conflict`. A mistyped id creates a new, empty session;
        `existing_session` creates none. NumPy scalars are sent as numbers and text; raises `InvalidRequest`, naming the
        key, for values that JSON can't represent, and for an empty id.
        """
        call = calls.create_session(session_id, metadata=metadata, pin=pin, default=default)
        return ClientSession(self, self._send(call))

    def existing_session(self, session_id: str) -> ClientSession:
        """Return a session by its id, without a request. Its methods raise `NotFound` if there is no such session."""
        return ClientSession(self, session_id)

    def sessions(self) -> Iterator[SessionEntry]:
        """Yield every session in order of creation. Pages are fetched as needed."""
        after: int | None = 0
        while after is not None:
            entries, after = self._send(calls.list_sessions(after))
            yield from entries

    def take_snapshot(
        self,
        session_ids: Iterable[str] | None = None,
        *,
        since: int | None = None,
        idle_seconds: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        owner: str | None = None,
        wait_checks: int = 10,
    ) -> ClientSnapshot:
        """Take a snapshot of the sessions that match all arguments, by default of all sessions that the key may see.

        `since` excludes sessions that have not changed since an earlier snapshot or the snapshots it was based on;
        `idle_seconds` excludes sessions with a turn in the last so many seconds; `metadata` excludes sessions with
        different values for these keys. With an admin key, `owner` is the name of the API key that may use the
        snapshot, by default the caller's own. The gateway waits up to `wait_checks` seconds for pending bridge checks.
        Raises `InvalidRequest` if no session matches.
        """
        body: dict[str, Any] = {"since": since, "idle_seconds": idle_seconds, "owner": owner}
        body["wait_checks"] = wait_checks
        body["session_ids"] = None if session_ids is None else list(session_ids)
        body["metadata"] = None if metadata is None else json_object(metadata, "metadata")
        read, encoded = reader(int, "snapshot_id"), msgspec.json.encode(body)
        # A retry would take a second snapshot.
        call = Call("POST", "/snapshots", read, encoded, wait=wait_checks, repeatable=False)
        return ClientSnapshot(self, self._send(call))

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
        adapter: tuple[str, Path] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> ScoreReport:
        """Score recorded ids with an engine that this process opens, and keep the scores as a column per token.

        `engine` is `vllm` or `sglang` at `url`, or `transformers` in this process with the weights in the folder
        `model`, which must have the record's tokenizer in any case. Scores are the model's own log-probabilities, at
        temperature 1, before penalties and truncation; `ClientSession.trajectories` returns them in `columns`. Turns
        that already have the column are skipped unless `again`. With `precision`, the lower of both engines' dtypes
        (`float32` or `bfloat16`), scores are compared with the recorded logprobs, and `causes` in the report explains
        differences that are too large. `concurrency` sessions are scored at a time. `adapter` is the name and folder of
        a LoRA adapter to score with, only with `transformers`; turns sampled without it are not compared. Raises the
        errors of engines.

        >>> report = client.score("vllm", "http://127.0.0.1:8000", model="path/to/model")    # doctest: +SKIP
        """
        from tokentape.audit._scoring import SessionToScore, open_and_score

        ids = (entry.session_id for entry in self.sessions()) if session_ids is None else session_ids

        def recorded() -> Iterator[SessionToScore]:
            for session_id in ids:
                trajectories = ClientSession(self, session_id).trajectories()
                done = () if again else _turns_with(trajectories, column)
                yield SessionToScore(session_id, trajectories, done, {})

        async def write(columns: Sequence[TurnColumn]) -> None:
            for values in columns:
                session = ClientSession(self, values.session_id)
                await asyncio.to_thread(session.annotate, values.name, values.values, turn=values.turn)

        arguments: dict[str, Any] = {"column": column, "precision": precision, "concurrency": concurrency}
        arguments |= {"engine_model": engine_model, "adapter": adapter, "options": options}
        return asyncio.run(open_and_score(recorded(), write, engine, model, url, **arguments))

    def engine(self) -> EngineState:
        """Return the state of the engine: its model, whether it is paused, the weight version, replicas."""
        return self._send(calls.show_engine())

    def pause(self, *, abort: bool = False, timeout: float = 60.0) -> bool:
        """Make new calls wait while weights change, and wait up to `timeout` seconds for calls in flight.

        With `abort` these are aborted, and continue after `resume` if the gateway's `on_abort` is `resume`. Return
        whether all calls have ended. Needs an admin key.
        """
        return bool(self._send(calls.pause_engine(abort=abort, timeout=timeout)).idle)

    def resume(self, weight_version: str | None = None, *, adapter: str | None = None) -> None:
        """Let calls start again. `weight_version` is the new version of the weights or, with `adapter`, of the adapter.

        Needs an admin key.
        """
        self._send(calls.resume_engine(weight_version, adapter))

    def snapshot(self, snapshot_id: int) -> ClientSnapshot:
        """Return an earlier snapshot by its id, without a request."""
        return ClientSnapshot(self, snapshot_id)

    def snapshots(self) -> list[SnapshotManifest]:
        """Return all snapshots, oldest first, without their sessions."""
        return self._send(Call("GET", "/snapshots", reader(list[SnapshotManifest], "data")))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, call: Call[T]) -> T:
        retries = Retries(call, self._max_retries, self._timeout)
        return retries.result(self._answer(retries))

    def _answer(self, retries: Retries[Any], *, stream: bool = False) -> httpx2.Response:
        """Send a call, with retries, and return the last response. With `stream`, don't read its body on success."""
        while True:
            try:
                response = self._http.send(self._http.build_request(**retries.request()), stream=stream)
                if not response.is_success:
                    response.read()
            except httpx2.RequestError as error:
                if (delay := retries.delay(error)) is None:
                    raise calls.unreachable(self.base_url, error) from None
            else:
                if (delay := retries.delay(response)) is None:
                    return response
            time.sleep(delay)

    @contextmanager
    def _streamed(self, call: Call[bytes]) -> Iterator[httpx2.Response]:
        """Yield the response to a call before its body is read."""
        response = self._answer(Retries(call, self._max_retries, self._timeout), stream=True)
        try:
            if not response.is_success:
                raise calls.answered_error(response)
            yield response
        except httpx2.RequestError as error:
            raise calls.unreachable(self.base_url, error) from None
        finally:
            response.close()


class ClientSession:
    """A session on a gateway, returned by `Client.session` or `Client.existing_session`."""

    def __init__(self, client: Client, session_id: str) -> None:
        self._client = client
        self.session_id = session_id
        self.base_url = f"{client.base_url}{calls.session_path(session_id)}/v1"
        """The base URL for an agent's OpenAI client."""

    @property
    def api_key(self) -> str:
        """A key for this session only, for agents that can't use a session's base URL.

        The agent's base URL is then the gateway's, ending with `/v1`.
        """
        return str(self.info().api_key)

    def reward(self, value: float, *, turn: int | None = None, leaf: int | None = None) -> None:
        """Set a reward for the session, for one turn, or for the path to a leaf (the last turn of a branch).

        A trajectory's `reward` is the reward of its leaf or, without one, that of the session. Its `turn_rewards` are
        those of its turns. A later reward replaces an earlier one. Warns if the session has no turns and no metadata,
        because its id may be wrong.
        """
        calls.pass_on(self._client._send(calls.give_reward(self.session_id, value, turn, leaf)))

    def annotate(
        self, name: str, values: npt.ArrayLike, *, turn: int | None = None, leaf: int | None = None
    ) -> list[int]:
        """Attach a named number to each token: advantages, values, weights. Return the turns that now have values.

        With `turn`, pass one value per sampled token of that turn, or per added and sampled token. With `leaf`, pass
        one value per token of that trajectory; values for turns that are trained in an earlier trajectory are ignored.
        Values are stored as float32 and returned in `Trajectory.columns`. Later values for a turn replace earlier ones.

        >>> session.annotate("advantages", advantages, leaf=trajectory.leaf)            # doctest: +SKIP
        """
        return self._client._send(calls.annotate_tokens(self.session_id, name, values, turn, leaf))

    def info(self) -> SessionState:
        """Return the session's tree: turns, leaves with verdicts, aborted turns, rewards."""
        return self._client._send(calls.show_session(self.session_id))

    def trajectories(
        self, verdict: Collection[str] | None = None, *, wait_checks: int = 10, unread: bool = False
    ) -> list[Trajectory]:
        """Return one trajectory per leaf. Across all trajectories, each sampled token is trained once.

        The gateway waits up to `wait_checks` seconds for pending bridge checks. After that, verdicts of unchecked
        branches have `bridge unchecked`.

        `verdict` selects trajectories, for example `["exact", "forked:sibling"]`, or `"exact"`; `forked` means every
        fork. It does not change masks: turns trained in an excluded trajectory are not trained in a different one.

        Turns that no client has read completely are excluded unless `unread`.
        """
        return self._client._send(calls.read_trajectories(self.session_id, verdict, wait_checks, unread=unread))

    def media(self, sha256: str) -> bytes:
        """Return what the session recorded under this hash: an image as received, or an image processor's settings.

        `Trajectory.media` lists the hashes.
        """
        return self._client._send(calls.read_media(self.session_id, sha256))

    def delete(self) -> None:
        """Delete the session and its record."""
        self._client._send(calls.delete_session(self.session_id))

    def __repr__(self) -> str:
        return f"ClientSession({self.session_id!r})"


class ClientSnapshot:
    """A snapshot on a gateway, created by `Client.take_snapshot` or `Client.snapshot`.

    >>> snapshot = client.take_snapshot(idle_seconds=600)                           # doctest: +SKIP
    >>> digest = snapshot.save("batch.jsonl")                                       # doctest: +SKIP
    >>> snapshot.confirm(digest)                                                    # doctest: +SKIP
    >>> snapshot.drop().kept                                                        # doctest: +SKIP
    """

    def __init__(self, client: Client, snapshot_id: int) -> None:
        self._client = client
        self._path = f"/snapshots/{snapshot_id}"
        self.snapshot_id = snapshot_id

    def manifest(self) -> SnapshotManifest:
        """Return the snapshot's digest, counts, verdicts and columns, and the turns and leaves of each session."""
        return self._client._send(Call("GET", self._path, reader(SnapshotManifest)))

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield the snapshot's trajectories, the same in each call. Only `save` checks the digest."""
        with self._streamed(JSON_LINES) as response:
            for line in response.iter_lines():
                yield trajectory_from_json(msgspec.json.decode(line))

    def save(self, path: str | Path) -> str:
        """Write the contents to a file, check them, flush them to disk, and return their digest.

        The format is JSON lines if the file name ends with `.jsonl`, else Parquet. The file gets its name once it is
        complete and durable. Raises `GatewayUnavailable` if the contents have another digest than the gateway names,
        and `InvalidRequest` if `path` exists but is not a regular file.
        """
        path = Path(path)
        if path.exists() and not path.is_file():
            raise InvalidRequest(f"{path} is not a regular file: the file is read back after it is written", "path")
        lines = path.suffix == ".jsonl"
        with durable_file(path) as file:
            with self._streamed(JSON_LINES if lines else PARQUET) as answer:
                expected: str = answer.headers["x-tokentape-digest"]
                for chunk in answer.iter_bytes():
                    file.write(chunk)
            file.flush()
            digest = hashlib.sha256()
            with open(file.name, "rb") as saved:
                for line in saved if lines else map(json_line, iter_parquet(Path(file.name))):
                    digest.update(line)
            if digest.hexdigest() != expected:
                raise GatewayUnavailable(
                    f"the received contents of snapshot {self.snapshot_id} have digest {digest.hexdigest()}, not "
                    f"{expected}; get it again"
                )
        return expected

    def confirm(self, digest: str) -> None:
        """Confirm that the contents are stored safely, so that the sessions may be deleted.

        `digest`, which `save` returns, is the SHA-256 of the received contents as JSON lines. Raises `Conflict` if the
        gateway has another digest.
        """
        self._client._send(Call("POST", f"{self._path}/confirm", nothing, msgspec.json.encode({"digest": digest})))

    def drop(self) -> DropReport:
        """Delete the sessions of a confirmed snapshot from the gateway, permanently, and release it.

        The report lists the ids of deleted sessions in `dropped`, and the other sessions in `kept` with the reason, for
        example that they have changed since. Raises `Conflict` for a snapshot that is not confirmed.
        """
        # A retry would return a different report.
        call = Call("DELETE", f"{self._path}?drop_sessions=true", reader(DropReport), repeatable=False)
        return self._client._send(call)

    def release(self) -> None:
        """Release the snapshot and its contents. The sessions stay."""
        self._client._send(Call("DELETE", self._path, nothing))

    def _streamed(self, accept: str) -> AbstractContextManager[httpx2.Response]:
        return self._client._streamed(Call("GET", f"{self._path}/trajectories", bytes, accept=accept))

    def __repr__(self) -> str:
        return f"ClientSnapshot({self.snapshot_id})"


def _turns_with(trajectories: Iterable[Trajectory], column: str) -> set[int]:
    """Return the trained turns with values in a column (not NaN)."""
    return {
        turn
        for trajectory in trajectories
        if column in trajectory.columns
        for turn, start, end in trajectory.completions()
        if trajectory.loss_mask[start:end].all() and not np.isnan(trajectory.columns[column][start:end]).any()
    }
