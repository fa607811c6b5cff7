"""Completions that an engine aborts, compared with uninterrupted ones of the same engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.gateway.scripted import run_turn
from tests.waiting import PATIENCE
from tokentape._session.verdict import verdict
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import EngineInfo, Payload, SampleDelta, SamplingParams, WeightSpan
from tokentape.engines._pool import EnginePool
from tokentape.errors import EngineAborted, EngineError, EngineUnavailable
from tokentape.gateway._app import create_app
from tokentape.gateway._events import TurnDelta, TurnDone, TurnRequest
from tokentape.gateway._limits import Limits, OnAbort
from tokentape.gateway._sampling import SplitStopFinder, rest_params, resume_obstacle
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import Resume, TokenIds, Turn

ALL = SamplingParams(max_tokens=0)
"""As many tokens as fit."""

TEXT = "<think>a thought</think>one, two. Three! four<|im_end|>"


@dataclass(eq=False)
class Interrupted:
    """Says the token of `ids` that follows what its prompt has of them; ends calls with `abort` where `aborts` say.

    An entry of `aborts` is how much of the completion there is then; one is used up by each call, and a call ends
    by itself if there are none left. It looks for stop strings in what it has sampled itself, and for nothing before
    `min_tokens`. As in vLLM 0.32, the text of a prompt that ends inside a character counts as sampled.
    """

    renderer: Renderer
    ids: list[int]
    aborts: list[int] = field(default_factory=list)
    info: EngineInfo = field(init=False)
    requests: list[tuple[list[int], SamplingParams, bool]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    spans: bool = False
    refuses: list[EngineError] = field(default_factory=list)
    """What calls after the first raise instead of sampling."""
    stall: int | None = None
    """The first call stalls after this many tokens until it is abandoned, or `interrupt` ends it."""
    ends: asyncio.Event | None = None
    """Set by `interrupt`; None: it can't be interrupted."""
    stalled: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        vocab = self.renderer.tokenizer.vocab_size
        names = frozenset(parameter.name for parameter in fields(SamplingParams))
        self.info = EngineInfo("plain", "1", "m", vocab, 1 << 20, "raw_logprobs", names)

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        first = not self.requests
        self.requests.append((prompt_ids.tolist(), params, stream))
        if not first and self.refuses:
            raise self.refuses.pop(0)
        before = len(prompt_ids) - len(self.requests[0][0])
        version = self.versions.pop(0) if self.versions else None
        abort = self.aborts.pop(0) if self.aborts else None
        deltas: list[SampleDelta] = []
        text, passed = b"".join(map(self.renderer.tokenizer.token_bytes, prompt_ids.tolist())), 0
        if not text.decode("utf-8", "replace").endswith("\ufffd"):
            text = b""
        while True:
            at = before + len(deltas)
            if at == self.stall and first:
                self.stalled.set()
                await (self.ends or asyncio.Event()).wait()
                abort = at
            if at == abort:
                deltas.append(SampleDelta((), (), "abort"))
            else:
                token_id, sampled = self.ids[at], len(deltas) + 1
                text += self.renderer.tokenizer.token_bytes(token_id)
                stop: int | str | None = None
                if sampled > params.min_tokens:
                    # One that ends before then is passed over.
                    stop = next(
                        (
                            string
                            for string in params.stop_strings
                            if string.encode() in text[max(passed - len(string) + 1, 0) :]
                        ),
                        None,
                    )
                    stop = token_id if token_id in params.stop_token_ids else stop
                else:
                    passed = len(text)
                finish = "stop" if stop is not None else "length" if sampled == params.max_tokens else None
                tops = ((token_id, -0.5 - at), (0, -9.0))
                deltas.append(
                    SampleDelta(
                        (token_id,), (-0.5 - at,), finish, stop, (tops,) if params.top_logprobs else (), version
                    )  # type: ignore[arg-type]
                )
            if stream and deltas[-1].finish_reason is None:
                yield deltas[-1]
                await asyncio.sleep(0)
            if deltas[-1].finish_reason is not None:
                break
        yield self._last(deltas, params, stream, before, version)

    def _last(
        self, deltas: Sequence[SampleDelta], params: SamplingParams, stream: bool, before: int, version: str | None
    ) -> SampleDelta:
        sampled = sum(len(delta.token_ids) for delta in deltas)
        last = deltas[-1]
        if not stream:
            last = replace(
                last,
                token_ids=sum((delta.token_ids for delta in deltas), ()),
                logprobs=sum((delta.logprobs for delta in deltas), ()),
                top_logprobs=sum((delta.top_logprobs for delta in deltas), ()),
                weight_version=version,
            )
        if self.spans and version is not None and sampled:
            last = replace(last, weight_spans=(WeightSpan(version, 0, sampled),))
        if params.payloads_from is not None:
            end = len(self.requests[0][0]) + before + sampled - 1
            rows = np.arange(params.payloads_from, end).reshape(-1, 1)
            last = replace(last, payloads=(Payload("routed_experts", params.payloads_from, rows),))
        return last

    def interrupt(self, request_id: str) -> bool:
        if self.ends is not None:
            self.ends.set()
        return self.ends is not None

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass


@dataclass
class Call:
    """A caller's reply and the recorded turns."""

    turns: list[Turn]
    text: str
    error: EngineError | None
    session: str

    @property
    def turn(self) -> Turn:
        assert self.error is None
        return self.turns[0]


async def take(
    turns: Turns,
    sampling: SamplingParams = ALL,
    *,
    n: int = 1,
    stream: bool = False,
    session: str = "s",
) -> tuple[str, EngineError | None]:
    request = TurnRequest(session, ({"role": "user", "content": "a"},), (), {}, sampling, n=n, stream=stream)
    text = ""
    try:
        async for event in run_turn(turns, request):
            if isinstance(event, TurnDelta) and event.choice == 0:
                text += event.reply.reasoning + event.reply.content
            elif isinstance(event, TurnDone) and event.choice == 0:
                text += event.rest.reasoning + event.rest.content + f"[{event.finish}]"
    except EngineError as error:
        return text, error
    return text, None


class Caller:
    """Calls gateways over one record, each call in its own session."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self._sessions = 0

    def __call__(
        self,
        engine: Interrupted,
        sampling: SamplingParams = ALL,
        *,
        n: int = 1,
        stream: bool = False,
        on_abort: OnAbort = "resume",
        resumes: int = 32,
        payloads: bool = False,
    ) -> Call:
        self._sessions += 1
        session = f"s{self._sessions}"
        limits = Limits(resumes=resumes)
        turns = Turns(engine, engine.renderer, self.store, on_abort=on_abort, limits=limits, payloads=payloads)
        text, error = asyncio.run(take(turns, sampling, n=n, stream=stream, session=session))
        return Call(list(self.store.load_session(session).turns) if len(turns.sessions) else [], text, error, session)


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Caller]:
    store = SqliteStore.open(tmp_path)
    yield Caller(store)
    store.close()


@pytest.fixture
def ids(renderer: Renderer) -> list[int]:
    return renderer.tokenizer.encode_plain(TEXT)


def same(found: Turn, wanted: Turn) -> None:
    for name in ("completion_ids", "logprobs"):
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist()
    assert (found.finish_reason, found.stop, found.reply) == (wanted.finish_reason, wanted.stop, wanted.reply)


REQUESTS = {
    "stop id": SamplingParams(max_tokens=0),
    "length": SamplingParams(max_tokens=9),
    "stop string": SamplingParams(max_tokens=0, stop_strings=("o. Th", "zzz")),
    "min_tokens": SamplingParams(max_tokens=0, stop_strings=("e, t", "ought", "ree! f"), min_tokens=8),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("sampling", REQUESTS.values(), ids=REQUESTS)
def test_completion_aborted_anywhere_equals_the_uninterrupted_one(
    call: Caller, renderer: Renderer, ids: list[int], sampling: SamplingParams, stream: bool
) -> None:
    sampling = replace(sampling, top_logprobs=2)
    whole = call(Interrupted(renderer, ids), sampling, stream=stream)
    for at in range(len(whole.turn.completion_ids)):
        for aborts in ([at], [at, at], [at, at + 1]):
            engine = Interrupted(renderer, ids, list(aborts))
            cut = call(engine, sampling, stream=stream)
            same(cut.turn, whole.turn)
            assert cut.text == whole.text
            assert verdict([cut.turn]) == verdict([whole.turn])
            seams = sorted({abort for abort in aborts if abort and abort < len(whole.turn.completion_ids)})
            assert cut.turn.resumes == tuple(Resume(seam, "engine_abort") for seam in seams)
            assert len(cut.turns) == 1


def test_engine_is_not_checked_after_a_stop_string_of_an_uninterrupted_call(
    call: Caller, renderer: Renderer, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = []

    async def check() -> None:
        checks.append(True)

    engine = Interrupted(renderer, ids)
    monkeypatch.setattr(engine, "check", check)
    assert call(engine, REQUESTS["stop string"]).turn.stop == "o. Th"
    assert not checks


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_abort_inside_a_character_does_not_end_at_a_stop_string_of_the_prompt(
    call: Caller, renderer: Renderer, stream: bool
) -> None:
    ids = renderer.tokenizer.encode_plain("one 🍕 two user three<|im_end|>")
    sampling = SamplingParams(max_tokens=0, stop_strings=("user",))
    whole = call(Interrupted(renderer, ids), sampling, stream=stream)
    assert whole.turn.stop == "user"
    for at in range(1, len(whole.turn.completion_ids)):
        same(call(Interrupted(renderer, ids, [at]), sampling, stream=stream).turn, whole.turn)


def test_gateway_searches_stop_strings_if_the_engine_would_end_before_min_tokens(
    call: Caller, renderer: Renderer
) -> None:
    ids = renderer.tokenizer.encode_plain("user two user three<|im_end|>")
    sampling = SamplingParams(max_tokens=0, stop_strings=("user",), min_tokens=2)
    engine = Interrupted(renderer, ids)
    engine.info = replace(engine.info, early_stops=True)
    turn = call(engine, sampling).turn
    assert (turn.stop, renderer.tokenizer.decode(turn.completion_ids.tolist())) == ("user", "user two user")
    assert [params.stop_strings for _, params, _ in engine.requests] == [()]


def test_call_of_a_pool_that_the_gateway_cuts_is_named_by_a_check_of_its_replica(
    call: Caller, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = renderer.tokenizer.encode_plain("user two user three<|im_end|>")
    sampling = SamplingParams(max_tokens=0, stop_strings=("user",), min_tokens=2)
    engines = [Interrupted(renderer, ids) for _ in range(2)]

    async def opened(engine: Interrupted) -> Interrupted:
        return engine

    async def restarted(engine: Interrupted) -> None:
        engine.info = replace(engine.info, version="2")

    for engine in engines:
        engine.info = replace(engine.info, early_stops=True)
        monkeypatch.setattr(engine, "check", partial(restarted, engine))
    pool = asyncio.run(EnginePool.open({f"r{at}": partial(opened, engine) for at, engine in enumerate(engines)}))
    for session in range(8):
        for engine in engines:
            engine.requests, engine.info = [], replace(engine.info, version="1")
        asyncio.run(take(Turns(pool, renderer, call.store), sampling, session=f"p{session}"))
        (turn,) = call.store.load_session(f"p{session}").turns
        assert (turn.stop, turn.engine) == ("user", "plain 2 raw_logprobs")
        assert {engine.info.version for engine in engines if not engine.requests} == {"1"}


def test_prompt_that_ends_inside_a_character_does_not_end_at_its_own_stop_string(
    call: Caller, renderer: Renderer
) -> None:
    prompt = np.array(renderer.tokenizer.encode_plain("user 🍕")[:-1], np.int32)
    ids = renderer.tokenizer.encode_plain("two user three<|im_end|>")
    sampling = SamplingParams(max_tokens=0, stop_strings=("user",))
    request = TurnRequest("s", (), (), {}, sampling, prompt_ids=prompt)

    async def run() -> Turn:
        turns = Turns(Interrupted(renderer, ids), renderer, call.store)
        events = [event async for event in run_turn(turns, request)]
        return next(event.turn for event in events if isinstance(event, TurnDone))

    turn = asyncio.run(run())
    assert (turn.stop, renderer.tokenizer.decode(turn.completion_ids.tolist())) == ("user", "two user")


def test_abort_at_the_last_token_keeps_its_finish_reason(call: Caller, renderer: Renderer, ids: list[int]) -> None:
    for sampling in REQUESTS.values():
        whole = call(Interrupted(renderer, ids), sampling).turn
        engine = Interrupted(renderer, ids, [len(whole.completion_ids)])
        unstopped = replace(sampling, stop_strings=(), max_tokens=0)
        # The engine reports no stop, because the request had none.
        engine.sample = lambda prompt, params, *, _e=engine, _u=unstopped, **more: Interrupted.sample(  # type: ignore[method-assign]
            _e, prompt, replace(_u, max_tokens=1 << 20), **more
        )
        cut = call(engine, sampling)
        same(cut.turn, whole)
        assert (len(engine.requests), cut.turn.resumes) == (1, ())


def test_resume_request_has_the_remaining_limits(call: Caller, renderer: Renderer, ids: list[int]) -> None:
    engine = Interrupted(renderer, ids, [4])
    sampling = SamplingParams(max_tokens=20, min_tokens=6, seed=3, temperature=0.7, top_p=0.9, top_logprobs=1)
    turn = call(engine, sampling).turn
    (prompt, first, _), (more, second, _) = engine.requests
    assert more == prompt + ids[:4]
    assert (second.max_tokens, second.min_tokens) == (16, 2)
    assert second.seed not in (None, first.seed)
    assert turn.sampling["resume_seeds"] == [second.seed]
    changed = {field.name for field in fields(first) if getattr(first, field.name) != getattr(second, field.name)}
    assert changed == {"max_tokens", "min_tokens", "seed"}
    assert (turn.sampling["max_tokens"], turn.sampling["seed"]) == (20, 3)


def test_a_refused_resume_is_recorded_with_one_seed(
    call: Caller, renderer: Renderer, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokentape.gateway._sampling.RETRY_SECONDS", 0)
    engine = Interrupted(renderer, ids, [4, 6], refuses=[EngineUnavailable("503"), EngineUnavailable("503")])
    turn = call(engine, SamplingParams(max_tokens=20, seed=3)).turn
    seeds = list(dict.fromkeys(params.seed for _, params, _ in engine.requests))
    assert (turn.sampling["resume_seeds"], len(turn.resumes), len(seeds)) == (seeds[1:], 2, 3)


def test_every_parameter_is_classified_for_resuming() -> None:
    # For a new parameter, check `rest_params` and `resume_obstacle`: does its effect depend on sampled tokens?
    each_token = {"temperature", "top_p", "top_k", "min_p", "stop_token_ids", "top_logprobs", "supports"}
    server = {"priority", "cache_salt", "session_id", "adapter"}
    carried = {"max_tokens", "min_tokens", "seed", "stop_strings", "payloads_from"}
    hindering = {"presence_penalty", "frequency_penalty", "repetition_penalty", "json_schema", "structural_tag"}
    assert {field.name for field in fields(SamplingParams)} == each_token | server | carried | hindering


@pytest.mark.parametrize(
    ("name", "value"), [("presence_penalty", 0.5), ("frequency_penalty", 1), ("repetition_penalty", 2)]
)
def test_partial_completion_is_kept_under_a_completion_only_penalty(
    call: Caller, renderer: Renderer, ids: list[int], name: str, value: float
) -> None:
    sampling = replace(SamplingParams(max_tokens=0), **{name: value})
    engine = Interrupted(renderer, ids, [5])
    kept = call(engine, sampling)
    assert kept.turn.completion_ids.tolist() == ids[:5]
    assert kept.turn.finish_reason == "length"
    assert kept.turn.sampling["aborted"] == {"cause": "engine_abort", "outcome": "kept", "why": name}
    assert kept.text.endswith("[length]")
    # The scripted engine reports the numbers before penalties.
    assert verdict([kept.turn]) == "exact, kept partial, other logprobs"
    engine = Interrupted(renderer, ids, [5])
    engine.info = replace(engine.info, prompt_penalties=frozenset({name}))
    assert resume_obstacle(sampling, engine.info) is None
    assert call(engine, sampling).turn.completion_ids.tolist() == ids


def test_partial_completion_is_kept_after_the_resume_limit(call: Caller, renderer: Renderer, ids: list[int]) -> None:
    engine = Interrupted(renderer, ids, [2, 4, 6, 8])
    kept = call(engine, resumes=3)
    assert len(engine.requests) == 4
    assert kept.turn.completion_ids.tolist() == ids[:8]
    assert [resume.start for resume in kept.turn.resumes] == [2, 4, 6]
    assert kept.turn.sampling["aborted"]["why"] == "resumes"


def test_on_abort_keep_keeps_the_partial_completion(call: Caller, renderer: Renderer, ids: list[int]) -> None:
    kept = call(Interrupted(renderer, ids, [5]), on_abort="keep")
    assert (kept.turn.completion_ids.tolist(), kept.turn.sampling["aborted"]["why"]) == (ids[:5], "on_abort")


def test_on_abort_resample_samples_again(call: Caller, renderer: Renderer, ids: list[int]) -> None:
    failed = call(Interrupted(renderer, ids, [5]), on_abort="resample")
    assert isinstance(failed.error, EngineAborted)
    assert (failed.error.code, failed.error.retry) == ("engine_abort", True)
    (turn,) = failed.turns
    assert (turn.finish_reason, turn.abort_cause, turn.completion_ids.tolist()) == ("abort", "engine_abort", ids[:5])
    assert turn.sampling["aborted"]["outcome"] == "resampled"


@pytest.mark.parametrize("on_abort", ["resume", "keep", "resample"])
def test_abort_before_the_first_token_is_retried(
    call: Caller, renderer: Renderer, ids: list[int], on_abort: OnAbort
) -> None:
    engine = Interrupted(renderer, ids, [0, 0])
    turn = call(engine, on_abort=on_abort).turn
    assert (turn.completion_ids.tolist(), turn.resumes, len(engine.requests)) == (ids, (), 3)
    failed = call(Interrupted(renderer, ids, [0] * 4), on_abort=on_abort, resumes=3)
    assert isinstance(failed.error, EngineAborted)
    assert not failed.turns


@pytest.mark.parametrize("spans", [False, True], ids=["per delta", "spans"])
def test_each_part_has_its_weights(call: Caller, renderer: Renderer, ids: list[int], spans: bool) -> None:
    engine = Interrupted(renderer, ids, [3, 3, 7], versions=["1", "2", "2", "3"], spans=spans)
    turn = call(engine, stream=True).turn
    assert (turn.weight_version, turn.weight_changes) == ("1", ((3, "2"), (7, "3")))


def test_server_without_a_version_has_unknown_weights_if_another_reports_one(
    call: Caller, renderer: Renderer, ids: list[int]
) -> None:
    engine = Interrupted(renderer, ids)
    turns = Turns(engine, renderer, call.store)

    def weights(session: str, *reported: str, **sampling: Any) -> str:
        engine.requests, engine.versions = [], [*reported]
        asyncio.run(take(turns, replace(ALL, **sampling), stream=True, session=session))
        return call.store.load_session(session).turns[0].weight_version

    turns.gate.open("8")
    assert weights("none reports") == "8"
    assert weights("it reports", "8") == "8"
    assert weights("another has reported") == "unknown"
    turns.gate.open("a-8", "a")
    assert weights("adapter", adapter="a") == "a-8"
    turns.gate.open("9")
    assert weights("newer weights") == "9"


def test_rows_per_token_continue_after_a_resume(call: Caller, renderer: Renderer, ids: list[int]) -> None:
    wanted = call(Interrupted(renderer, ids), payloads=True)
    cut = call(Interrupted(renderer, ids, [3, 6]), payloads=True)
    found = []
    for each in (wanted, cut):
        (trajectory,) = call.store.load_session(each.session, per_token=True).trajectories()
        found.append(trajectory.payloads["routed_experts"])
    assert found[0].known.tolist() == found[1].known.tolist()
    assert found[0].rows.tolist() == found[1].rows.tolist()


def test_each_choice_resumes_separately(call: Caller, renderer: Renderer, ids: list[int]) -> None:
    engine = Interrupted(renderer, ids, [3, 5])
    turns = call(engine, n=3, stream=True).turns
    assert [turn.completion_ids.tolist() for turn in turns] == [ids] * 3
    assert sorted(len(turn.resumes) for turn in turns) == [0, 1, 1]


def test_logprob_kind_is_unknown_after_a_server_changes_its_mode(
    call: Caller, renderer: Renderer, ids: list[int]
) -> None:
    engine = Interrupted(renderer, ids, [3])
    plain = engine.sample

    async def named(*args: Any, **more: Any) -> AsyncGenerator[SampleDelta, None]:
        mode = "raw_logprobs" if not engine.requests else "processed_logprobs"
        async for delta in plain(*args, **more):
            yield replace(delta, engine=f"plain 1 {mode}")

    engine.sample = named  # type: ignore[method-assign]
    turn = call(engine, SamplingParams(max_tokens=0, temperature=0.5)).turn
    assert turn.resumes == (Resume(3, "engine_abort", "plain 1 processed_logprobs"),)
    assert (turn.engine, turn.logprobs_of) == ("plain 1 raw_logprobs", None)


def test_paused_engine_is_retried_until_it_resumes(
    call: Caller, renderer: Renderer, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokentape.gateway._sampling.RETRY_SECONDS", 0)
    engine = Interrupted(renderer, ids, [3], refuses=[EngineUnavailable("paused")] * 2)
    turn = call(engine).turn
    assert (turn.completion_ids.tolist(), len(engine.requests)) == (ids, 4)


@pytest.mark.parametrize("paused", [True, False])
def test_first_call_waits_only_for_an_engine_that_is_paused(
    call: Caller, renderer: Renderer, ids: list[int], monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    monkeypatch.setattr("tokentape.gateway._sampling.RETRY_SECONDS", 0)
    engine = Interrupted(renderer, ids)
    plain, refusals = engine.sample, [EngineUnavailable("503"), EngineUnavailable("503")]
    for refusal in refusals:
        refusal.paused = paused

    async def refused(*args: Any, **more: Any) -> AsyncGenerator[SampleDelta, None]:
        if refusals:
            raise refusals.pop()
        async for delta in plain(*args, **more):
            yield delta

    engine.sample = refused  # type: ignore[method-assign]
    found = call(engine)
    if paused:
        assert (found.turn.completion_ids.tolist(), found.turn.resumes, refusals) == (ids, (), [])
    else:
        assert isinstance(found.error, EngineUnavailable)
        assert len(refusals) == 1


def test_call_with_a_broken_connection_is_not_resumed(call: Caller, renderer: Renderer, ids: list[int]) -> None:
    engine = Interrupted(renderer, ids)
    plain = engine.sample

    async def broken(*args: Any, **more: Any) -> AsyncGenerator[SampleDelta, None]:
        async for delta in plain(*args, **more):
            yield delta
            raise EngineError("the connection broke")

    engine.sample = broken  # type: ignore[method-assign]
    failed = call(engine, stream=True)
    assert failed.error is not None
    assert [(turn.finish_reason, turn.abort_cause) for turn in failed.turns] == [("abort", "engine_error")]


@pytest.mark.parametrize("graceful", [False, True], ids=["left", "interrupted"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_gateway_pause_with_abort_resumes_the_call(
    call: Caller, renderer: Renderer, ids: list[int], stream: bool, graceful: bool
) -> None:
    store = call.store

    async def paused() -> str:
        engine = Interrupted(renderer, ids, stall=4, ends=asyncio.Event() if graceful else None)
        turns = Turns(engine, renderer, store)
        call = asyncio.create_task(take(turns, stream=stream))
        await engine.stalled.wait()
        assert await turns.pausing.pause(abort=True, seconds=60)
        assert (turns.gate.calls.count, len(engine.requests), call.done()) == (0, 1, False)
        await turns.pausing.resume("new")
        text, error = await call
        assert error is None
        return text

    streamed = asyncio.run(paused())
    (turn,) = store.load_session("s").turns
    assert turn.completion_ids.tolist() == ids
    assert streamed == call(Interrupted(renderer, ids), stream=stream).text
    if stream or graceful:
        assert turn.resumes == (Resume(4, "paused"),)
        assert turn.weight_changes == ((4, "new"),)
        assert "aborted" not in turn.sampling
    else:
        assert turn.resumes == ()
        assert turn.sampling["aborted"] == {"cause": "paused", "outcome": "resampled", "why": "not streamed"}


def test_disconnect_during_a_resume_records_an_aborted_turn(call: Caller, renderer: Renderer, ids: list[int]) -> None:
    store = call.store

    async def left() -> None:
        engine = Interrupted(renderer, ids, [2], refuses=[EngineUnavailable("paused")] * 99)
        turns = Turns(engine, renderer, store)
        call = asyncio.create_task(take(turns, stream=True))
        while len(engine.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        await turns.abort_all()

    asyncio.run(left())
    (turn,) = store.load_session("s").turns
    assert (turn.finish_reason, turn.abort_cause, turn.completion_ids.tolist()) == ("abort", "client_left", ids[:2])


def test_seam_search_equals_a_full_text_search() -> None:
    spell = {n: bytes([n]) for n in range(256)}.__getitem__
    for strings in (["abc"], ["ab", "bca"], ["c"], ["aa"]):
        for text in ("xaabcab", "abcabc", "aaaa", "xbcaab"):
            for cut in range(1, len(text)):
                finder = SplitStopFinder(spell, strings, list(text[:cut].encode()), 0)
                for at in range(cut, len(text)):
                    found = finder.push(ord(text[at]))
                    reaching = [
                        string for string in strings if text[: at + 1].endswith(string) and at + 1 - len(string) < cut
                    ]
                    if reaching:
                        assert found in reaching or (found is not None and text[: at + 1].endswith(found))
                    elif found is not None:
                        assert text[: at + 1].endswith(found)


def test_resumed_part_gets_a_different_seed_at_each_position() -> None:
    params = SamplingParams(max_tokens=100, seed=7)
    seeds = {rest_params(params, at).seed for at in range(50)} | {7}
    assert len(seeds) == 51
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)


def test_stream_continues_across_a_pause(call: Caller, renderer: Renderer, ids: list[int]) -> None:
    engine = Interrupted(renderer, ids, [], stall=4)
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
    turns = Turns(engine, renderer, call.store)
    with running(create_app(turns, model_id="m")) as url, httpx2.Client(base_url=url, timeout=PATIENCE) as http:
        paused, lines = False, []
        with http.stream("POST", "/sessions/s/v1/chat/completions", json=body) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if not paused and line.startswith("data: "):
                    paused = True
                    assert httpx2.post(f"{url}/engine/pause", json={"mode": "abort"}, timeout=PATIENCE).json()["idle"]
                    httpx2.post(f"{url}/engine/resume", json={"weight_version": "new"}, timeout=PATIENCE)
        (turn,) = call.store.load_session("s").turns
    assert not any("error" in line for line in lines)
    assert "data: [DONE]" in lines
    assert turn.completion_ids.tolist() == ids
    assert [resume.cause for resume in turn.resumes] == ["paused"]
