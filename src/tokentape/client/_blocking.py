"""The client for scripts and threads: each method returns when the gateway has answered."""

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

    All methods raise the error of `tokentape.errors` that the gateway answered with, and `GatewayUnavailable` if it
    can't be reached or did not answer within `timeout` seconds, repetitions included. A call that is safe to repeat is
    sent again up to `max_retries` times, over about 15 seconds by default, so a gateway may be restarted in between.
    Errors have the answer's `retry_after`, in seconds. Raises `InvalidRequest` for what is no URL or key.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8800",
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 5,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._max_retries = max_retries
        self._http = httpx2.Client(**calls.http_options(self.base_url, api_key))

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
        one raises `Conflict`. So a wrong id makes a new, empty session; `sessions` lists those that exist.
        """
        created_id = self._send(calls.create_session(session_id, metadata, pin, default))
        session = ClientSession(self, created_id or str(session_id))
        if created_id is None:
            calls.check_made(session.info(), metadata, pin, default)
        return session

    def sessions(self) -> Iterator[SessionEntry]:
        """Yield every session in order of creation. Pages are fetched when they are needed."""
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
        wait_checks: int = 10,
    ) -> ClientSnapshot:
        """Take a snapshot of the sessions that match all given arguments, by default of all that this key may see.

        `since` excludes sessions that have not changed since an earlier snapshot and those that it was based on;
        `idle_seconds` excludes sessions with a turn in so many seconds; `metadata` excludes sessions with other values
        for these keys. The gateway waits up to `wait_checks` seconds for pending bridge checks. Raises `InvalidRequest`
        if no session is left.
        """
        body: dict[str, Any] = {"since": since, "idle_seconds": idle_seconds, "wait_checks": wait_checks}
        body["session_ids"] = None if session_ids is None else list(session_ids)
        body["metadata"] = None if metadata is None else dict(metadata)
        read, encoded = reader(int, "snapshot_id"), msgspec.json.encode(body)
        # Repeated, it would take a second snapshot.
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

        `engine` is `vllm` or `sglang` at `url`, or `transformers` here, with the weights in the folder `model`; that
        folder has the record's tokenizer in any case. The scores are the model's own log-probabilities, at temperature
        1, before penalties and truncation; `ClientSession.trajectories` returns them in `columns`. Turns that have the
        column are left alone unless `again`. With `precision`, `float32` or `bfloat16`, the lower one of both engines,
        what was recorded is compared, and `causes` of the report says why it is too far off, if it is.
        `concurrency` is how many sessions are scored at a time. `adapter` is the name and folder of a LoRA adapter to
        score with, only with `transformers`; turns of others are not compared. Raises the engines' errors.

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
        """Hold back new calls while weights change, and wait up to `timeout` seconds for those under way.

        With `abort` they are aborted, and continue after `resume` if the gateway's `on_abort` is `resume`. Returns
        whether no call is in flight any more. Needs an admin key.
        """
        return bool(self._send(calls.pause_engine(abort=abort, timeout=timeout)).idle)

    def resume(self, weight_version: str | None = None, *, adapter: str | None = None) -> None:
        """Let calls start again. `weight_version` is the name of the weights from now on, or of an adapter.

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
        """Send a call, with retries, and return the last answer. With `stream` a successful answer's body is unread."""
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
        """Yield the answer to a call before its body is read."""
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
    """One session of a gateway. Made by `Client.session`."""

    def __init__(self, client: Client, session_id: str) -> None:
        self._client = client
        self.session_id = session_id
        self.base_url = f"{client.base_url}{calls.session_path(session_id)}/v1"
        """The base URL for an agent's OpenAI client."""

    @property
    def api_key(self) -> str:
        """A key for this session only, for agents that can't have a session's base URL.

        The agent's base URL is then the gateway's, up to and including `/v1`.
        """
        return str(self.info().api_key)

    def reward(self, value: float, *, turn: int | None = None, leaf: int | None = None) -> None:
        """Give a reward to the session, to one turn's action, or to the whole path that ends with a leaf.

        A trajectory's `reward` is its leaf's, else the session's; `turn_rewards` are those of its turns. The last one
        given counts. Warns if the session has no turns and no metadata: its name may be wrong.
        """
        calls.pass_on(self._client._send(calls.give_reward(self.session_id, value, turn, leaf)))

    def annotate(
        self, name: str, values: npt.ArrayLike, *, turn: int | None = None, leaf: int | None = None
    ) -> list[int]:
        """Attach a named number to each token: advantages, values, weights. Return the turns that have them now.

        With `turn`, give one value per sampled token of that turn, or per added and sampled token. With `leaf`, give
        one per token of that trajectory; values of turns that are trained in an earlier trajectory are ignored. They
        are stored as float32 and returned in `Trajectory.columns`. Later values for a turn replace earlier ones.

        >>> session.annotate("advantages", advantages, leaf=trajectory.leaf)            # doctest: +SKIP
        """
        return self._client._send(calls.annotate_tokens(self.session_id, name, values, turn, leaf))

    def info(self) -> SessionState:
        """Return the session's tree: turns, leaves with verdicts, aborted turns, rewards."""
        return self._client._send(calls.show_session(self.session_id))

    def trajectories(
        self, verdict: Collection[str] | None = None, *, wait_checks: int = 10, unread: bool = False
    ) -> list[Trajectory]:
        """Return one trajectory per leaf. Over all of them each sampled token is trained once.

        The gateway waits up to `wait_checks` seconds for pending bridge checks. After that, verdicts of unchecked
        branches have `bridge unchecked`.

        `verdict` selects trajectories: `["exact", "forked:sibling"]`; `forked` stands for every fork. It does not
        change masks: turns trained in an excluded trajectory are not trained in another one.

        Turns that no client read to their end are excluded unless `unread`.
        """
        return self._client._send(calls.read_trajectories(self.session_id, verdict, wait_checks, unread=unread))

    def media(self, sha256: str) -> bytes:
        """Return an image of the session as received, or the settings of the image processor.

        `Trajectory.media` has the hashes of both.
        """
        return self._client._send(calls.read_media(self.session_id, sha256))

    def delete(self) -> None:
        """Delete the session and everything recorded of it."""
        self._client._send(calls.delete_session(self.session_id))

    def __repr__(self) -> str:
        return f"ClientSession({self.session_id!r})"


class ClientSnapshot:
    """One snapshot of a gateway. Made by `Client.take_snapshot` and `Client.snapshot`.

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
        """Yield the snapshot's trajectories, the same in each call. The digest is not checked; `save` checks it."""
        with self._streamed(JSON_LINES) as response:
            for line in response.iter_lines():
                yield trajectory_from_json(msgspec.json.decode(line))

    def save(self, path: str | Path) -> str:
        """Write the contents to a file, check them, flush them to the disk, and return their digest.

        The format is JSON lines for a name that ends with `.jsonl`, else Parquet. The file gets its name when it is
        complete and durable. Raises `GatewayUnavailable` if the contents don't have the gateway's digest, and
        `InvalidRequest` if the path is not a file's.
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
        """Confirm that the contents are stored safely, so that their sessions may be deleted.

        `digest`, which `save` returns, is the SHA-256 of the received contents as JSON lines. Raises `Conflict` if it
        differs from the gateway's.
        """
        self._client._send(Call("POST", f"{self._path}/confirm", nothing, msgspec.json.encode({"digest": digest})))

    def drop(self) -> DropReport:
        """Delete the sessions of a confirmed snapshot from the gateway, permanently, and release it.

        The report has the ids of deleted sessions in `dropped`, and in `kept` the others with a reason, for example
        that they have changed since. Raises `Conflict` for a snapshot that is not confirmed.
        """
        # Repeated, it would return another report.
        call = Call("DELETE", f"{self._path}?drop_sessions=true", reader(DropReport), repeatable=False)
        return self._client._send(call)

    def release(self) -> None:
        """Release the snapshot: its contents are not kept any more. Its sessions stay."""
        self._client._send(Call("DELETE", self._path, nothing))

    def _streamed(self, accept: str) -> AbstractContextManager[httpx2.Response]:
        return self._client._streamed(Call("GET", f"{self._path}/trajectories", bytes, accept=accept))

    def __repr__(self) -> str:
        return f"ClientSnapshot({self.snapshot_id})"


def _turns_with(trajectories: Iterable[Trajectory], column: str) -> set[int]:
    """Return the trained turns that have a column: its values are not NaN there."""
    return {
        turn
        for trajectory in trajectories
        if column in trajectory.columns
        for turn, start, end in trajectory.completions()
        if trajectory.loss_mask[start:end].all() and not np.isnan(trajectory.columns[column][start:end]).any()
    }
