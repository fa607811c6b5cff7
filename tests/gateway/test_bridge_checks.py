"""Bridges checked while the gateway runs: which are drawn, the findings, and their effects."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.scripted import ScriptedEngine, run_turn
from tests.gateway.test_metrics import samples
from tokentape._session.verdict import BRIDGE_CHECKED, BRIDGE_DUE, BRIDGE_SKIPPED
from tokentape.chat import _certificate_cache as certificate_cache
from tokentape.chat._bridge_check import BridgeCheck
from tokentape.chat._disk_cache import cache_directory, keep
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.engines._base import SamplingParams
from tokentape.gateway import _bridge_checks as bridge_checks
from tokentape.gateway._bridge_checks import BridgeChecks
from tokentape.gateway._events import TurnDone, TurnRequest
from tokentape.gateway._limits import CheckBridges
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore, verify
from tokentape.store._snapshots import Selection, Snapshots
from tokentape.types import Turn

pytestmark = pytest.mark.usefixtures("quick_proofs")

TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in ("add", "look")
)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calls(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 1}}}}\n</tool_call><|im_end|>'


class Talk:
    """One gateway over a directory, with an agent that continues from the replies."""

    def __init__(self, renderer: Renderer, store: SqliteStore, replies: Sequence[str], policy: CheckBridges) -> None:
        self.turns = Turns(ScriptedEngine(renderer, replies), renderer, store, check_bridges=policy)
        self.store = store
        self.messages: dict[str, list[Any]] = {}

    async def say(self, *new: Any, session: str = "s", n: int = 1) -> list[Turn]:
        messages = self.messages.setdefault(session, [])
        messages += new
        request = TurnRequest(session, tuple(messages), TOOLS, {}, SamplingParams(max_tokens=0), n=n)
        turns = [event.turn async for event in run_turn(self.turns, request) if isinstance(event, TurnDone)]
        messages.append(turns[0].reply)
        return turns

    async def answer(self, turn: Turn, session: str = "s") -> Turn:
        """Send the result of the call that the turn made."""
        (call,) = turn.reply["tool_calls"]
        (next_turn,) = await self.say({"role": "tool", "tool_call_id": call["id"], "content": "ok"}, session=session)
        return next_turn

    async def checked(self) -> None:
        await self.turns.checks.wait(None, 60)

    def verdicts(self, session: str = "s") -> list[str]:
        return [trajectory.verdict for trajectory in self.store.load_session(session).trajectories()]

    def kinds(self, session: str = "s") -> list[tuple[int | None, str]]:
        return [(event.turn, event.kind) for event in self.store.load_session(session).events]

    def outcomes(self, session: str = "s") -> list[str]:
        events = self.store.load_session(session).events
        return [event.body["outcome"] for event in events if event.kind == BRIDGE_CHECKED]

    def counted(self, *labels: str) -> float:
        return samples(self.turns.telemetry.metrics.exposition("")[0].decode()).get(labels, 0.0)


@asynccontextmanager
async def talking(
    renderer: Renderer, path: Path, replies: Sequence[str], policy: CheckBridges = "sample"
) -> AsyncIterator[Talk]:
    with SqliteStore.open(path) as store:
        talk = Talk(renderer, store, replies, policy)
        yield talk
        assert talk.turns.checks is not None
        await talk.turns.checks.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Checks wait until it is set."""
    go_on = threading.Event()
    real = bridge_checks._check

    def check(*args: Any) -> BridgeCheck:
        go_on.wait()
        return real(*args)

    monkeypatch.setattr(bridge_checks, "_check", check)
    return go_on


def never() -> float:
    return 0.999999


def test_verdict_is_unchecked_until_the_bridge_is_checked(
    renderer: Renderer, tmp_path: Path, held: threading.Event
) -> None:
    async def run() -> None:
        async with talking(renderer, tmp_path, ["one<|im_end|>", "two<|im_end|>"]) as talk:
            await talk.say(user("a"))
            assert talk.verdicts() == ["exact"]
            await talk.say(user("b"))
            assert talk.verdicts() == ["exact, bridge unchecked"]
            held.set()
            await talk.checked()
            assert talk.verdicts() == ["exact"]
            assert talk.counted("bridge_checks_total", "same") == 1

    asyncio.run(run())


def test_turn_digest_excludes_later_findings(renderer: Renderer, tmp_path: Path) -> None:
    async def run() -> None:
        async with talking(renderer, tmp_path, ["one<|im_end|>", "two<|im_end|>"]) as talk:
            await talk.say(user("a"))
            (turn,) = await talk.say(user("b"))
            await talk.checked()
            assert talk.store.load_session("s").turns[1].digest == turn.digest
            assert talk.kinds() == [(1, BRIDGE_DUE), (1, BRIDGE_CHECKED)]

    asyncio.run(run())
    assert verify(tmp_path).findings == ()


def test_first_bridge_of_a_kind_and_a_sample_are_checked(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with talking(renderer, tmp_path, ["one<|im_end|>"] * 5) as talk:
            assert talk.turns.checks is not None
            monkeypatch.setattr(talk.turns.checks._random, "random", never)
            for text in "abcd":
                await talk.say(user(text))
            monkeypatch.setattr(talk.turns.checks._random, "random", float)
            await talk.say(user("e"))
            await talk.checked()
            assert [turn for turn, kind in talk.kinds() if kind == BRIDGE_DUE] == [1, 4]

    asyncio.run(run())


def test_first_call_of_a_tool_is_a_new_kind(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        replies = [calls("add"), calls("add"), calls("look"), "done<|im_end|>"]
        async with talking(renderer, tmp_path, replies) as talk:
            assert talk.turns.checks is not None
            monkeypatch.setattr(talk.turns.checks._random, "random", never)
            (turn,) = await talk.say(user("a"))
            for _ in range(3):
                turn = await talk.answer(turn)
            await talk.checked()
            assert [turn for turn, kind in talk.kinds() if kind == BRIDGE_DUE] == [1, 3]

    asyncio.run(run())


def test_bridge_check_covers_each_choice(renderer: Renderer, tmp_path: Path) -> None:
    async def run() -> None:
        async with talking(renderer, tmp_path, ["one<|im_end|>"] * 3) as talk:
            await talk.say(user("a"))
            await talk.say(user("b"), n=2)
            await talk.checked()
            assert talk.verdicts() == ["exact", "forked: sibling"]
            assert talk.counted("bridge_checks_total", "same") == 1

    asyncio.run(run())


def test_verdict_stays_unchecked_when_checks_are_off(renderer: Renderer, tmp_path: Path) -> None:
    async def run() -> None:
        async with talking(renderer, tmp_path, ["one<|im_end|>"] * 3, "off") as talk:
            for text in "abc":
                await talk.say(user(text))
            await talk.checked()
            assert talk.verdicts() == ["exact, bridge unchecked"]
            assert talk.kinds() == [(1, BRIDGE_SKIPPED)]

    asyncio.run(run())


def test_full_queue_delays_no_call_and_is_counted(
    renderer: Renderer, tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge_checks, "WAITING", 1)

    async def run() -> None:
        async with talking(renderer, tmp_path, ["one<|im_end|>"] * 8, "all") as talk:
            for text in "abcdefgh":
                await talk.say(user(text))
            kinds = [kind for _, kind in talk.kinds()]
            # One running, if the thread has taken it yet, and one waiting.
            assert kinds.count(BRIDGE_SKIPPED) >= 5
            assert talk.counted("bridge_checks_total", "skipped") == kinds.count(BRIDGE_SKIPPED)
            held.set()
            await talk.checked()
            assert talk.verdicts() == ["exact, bridge unchecked"]

    asyncio.run(run())


def test_pending_checks_of_a_killed_gateway_run_when_the_session_is_loaded(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies() -> None:
        with monkeypatch.context() as patch, SqliteStore.open(tmp_path) as store:
            patch.setattr(BridgeChecks, "_offer", lambda *_, **__: None)
            talk = Talk(renderer, store, ["one<|im_end|>", "two<|im_end|>"], "sample")
            await talk.say(user("a"))
            await talk.say(user("b"))

    async def goes_on() -> None:
        async with talking(renderer, tmp_path, []) as talk:
            assert talk.verdicts() == ["exact, bridge unchecked"]
            await talk.turns.session("s")
            await talk.checked()
            assert talk.verdicts() == ["exact"]

    asyncio.run(dies())
    asyncio.run(goes_on())


LATE = "(messages[loop.index0 - 1].tool_calls or [{}])[0].function.name == 'look' and loop.index0 >= 18"
"""A tool result after the ninth reply, which called `look`."""


def edited(renderer: Renderer, old: str, new: str) -> Renderer:
    """A renderer of a template in which one text gave way to another."""
    source = renderer.template.source
    assert source.count(old) == 1
    return Renderer(renderer.tokenizer, ChatTemplate(source.replace(old, new)))


def wrong_late(renderer: Renderer) -> Renderer:
    """A renderer of a template that writes an extra word before some tool results, which no certificate shows."""
    result = "{{- '\\n<tool_response>\\n' +"
    return edited(renderer, result, f"{{{{- ' LATE' if {LATE} else '' -}}}}{result}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["all", "sample"])
def test_a_certificate_wrong_for_one_tool_on_a_late_turn_is_caught(
    renderer: Renderer, tmp_path: Path, policy: CheckBridges, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        replies = [*[calls("add")] * 8, calls("look"), calls("look"), "done<|im_end|>"]
        async with talking(wrong_late(renderer), tmp_path, replies, policy) as talk:
            (turn,) = await talk.say(user("a"))
            for _ in range(9):
                turn = await talk.answer(turn)
            await talk.checked()
            assert talk.verdicts() == ["exact, bridge differs"]
            assert talk.outcomes()[-1] == "differs"
            last = await talk.answer(turn)
            assert (last.parent, last.fork) == (9, None)
            assert " LATE" in talk.turns.renderer.tokenizer.decode(last.added_ids)
            await talk.checked()
            # The turn itself is right; the branch it is on is not.
            assert talk.verdicts() == ["exact, bridge differs"]
            assert talk.counted("bridge_revocations_total", "contextual") == 1

    asyncio.run(run())
    (line,) = [record.getMessage() for record in caplog.records if "differs from the template" in record.msg]
    assert "local bridge for tool" in line
    assert "LATE" not in line


def test_same_turns_without_the_fault_pass(renderer: Renderer, tmp_path: Path) -> None:
    async def run() -> None:
        replies = [*[calls("add")] * 8, calls("look"), calls("look"), "done<|im_end|>"]
        async with talking(renderer, tmp_path, replies, "all") as talk:
            (turn,) = await talk.say(user("a"))
            for _ in range(10):
                turn = await talk.answer(turn)
            await talk.checked()
            assert talk.verdicts() == ["exact"]
            assert talk.outcomes() == ["same"] * 10

    asyncio.run(run())


def changed_after(certified: Renderer, served: Renderer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the certificate of one renderer where another one's is looked for."""
    made = certificate_cache.load_or_certify(certified, {}, cache_directory("certificates"))
    monkeypatch.setenv("TOKENTAPE_CACHE", str(folder))
    path = cache_directory("certificates") / f"{certificate_cache._key(served, {})}.json"
    keep(path, replace(made, fingerprint=served.fingerprint).to_json())


COUNTED = "{{- '<|im_start|>user ' + (messages | length | string) + '\\n' +"
MEASURED = "{{- '<|im_start|>user ' + (messages[loop.index0 - 1].content | length | string) + '\\n' +"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("new", "goes_on"), [(COUNTED, "contextual"), (MEASURED, "fork")])
def test_a_template_changed_between_certify_and_serve_is_caught(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: str, goes_on: str
) -> None:
    served = edited(renderer, "{{- '<|im_start|>user\\n' +", new)
    changed_after(renderer, served, tmp_path / "cache", monkeypatch)

    async def run() -> None:
        async with talking(served, tmp_path / "data", ["one<|im_end|>"] * 3) as talk:
            await talk.say({"role": "system", "content": "s"}, user("a"))
            await talk.say(user("b"))
            await talk.checked()
            assert talk.verdicts() == ["exact, bridge differs"]
            (third,) = await talk.say(user("c"))
            prompt = talk.turns.engine.requests[2][0]  # type: ignore[attr-defined]
            if goes_on == "fork":
                assert third.fork == "template_rewrites"
                assert prompt == served.render(talk.messages["s"][:-1], list(TOOLS)).ids.tolist()
            else:
                assert (third.parent, third.fork) == (1, None)
                assert "<|im_start|>user 6\nc" in served.tokenizer.decode(prompt)
            assert talk.counted("bridge_revocations_total", goes_on) == 1

    asyncio.run(run())


def test_revocation_applies_when_the_session_is_loaded(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = edited(renderer, "{{- '<|im_start|>user\\n' +", COUNTED)
    changed_after(renderer, served, tmp_path / "cache", monkeypatch)

    async def run(*texts: str) -> Turn:
        async with talking(served, tmp_path / "data", ["one<|im_end|>"] * len(texts), "all") as talk:
            talk.messages["s"] = messages
            for text in texts:
                (turn,) = await talk.say(user(text))
                await talk.checked()
            return turn

    messages: list[Any] = [{"role": "system", "content": "s"}]
    asyncio.run(run("a", "b"))
    third = asyncio.run(run("c"))
    assert "user 6\n" in served.tokenizer.decode(third.added_ids)


def test_a_check_that_fails_leaves_the_verdict_unchecked(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> BridgeCheck:
        raise ValueError("a secret")

    monkeypatch.setattr(bridge_checks, "_check", fails)

    async def run() -> None:
        async with talking(renderer, tmp_path, ["one<|im_end|>"] * 2) as talk:
            await talk.say(user("a"))
            await talk.say(user("b"))
            await talk.checked()
            assert talk.verdicts() == ["exact, bridge unchecked"]
            assert talk.counted("bridge_checks_total", "unknown") == 1

    asyncio.run(run())


def test_bridge_recorded_after_shutdown_stays_pending(renderer: Renderer, tmp_path: Path) -> None:
    async def run() -> None:
        async with talking(renderer, tmp_path, ["one<|im_end|>"] * 2) as talk:
            await talk.say(user("a"))
            assert talk.turns.checks is not None
            await talk.turns.checks.close()
            await talk.say(user("b"))
            assert talk.kinds() == [(1, BRIDGE_DUE)]
            assert talk.counted("bridge_checks_total", "unknown") == 0

    asyncio.run(run())


def test_findings_for_a_deleted_session_are_dropped(renderer: Renderer, tmp_path: Path, held: threading.Event) -> None:
    async def run() -> None:
        async with talking(renderer, tmp_path, ["one<|im_end|>"] * 2) as talk:
            await talk.say(user("a"))
            await talk.say(user("b"))
            await talk.turns.delete_session("s")
            held.set()
            assert talk.turns.checks is not None
            await talk.turns.checks.close()
            assert talk.store.sessions() == []

    asyncio.run(run())
    assert verify(tmp_path).findings == ()


def test_snapshot_keeps_its_original_verdict(renderer: Renderer, tmp_path: Path, held: threading.Event) -> None:
    async def run() -> None:
        async with talking(renderer, tmp_path, ["one<|im_end|>"] * 2) as talk:
            await talk.say(user("a"))
            await talk.say(user("b"))
            custody = Snapshots(talk.store)
            early = await custody.take(Selection(), "", None)
            held.set()
            await talk.checked()
            late = await custody.take(Selection(), "", None)
            found = [
                [trajectory.verdict for trajectory in custody.trajectories(taken.snapshot_id)]
                for taken in (early, late)
            ]
            assert found == [["exact, bridge unchecked"], ["exact"]]

    asyncio.run(run())
