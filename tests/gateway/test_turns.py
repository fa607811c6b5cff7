"""Turns taken in a session, with an engine of scripted replies."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.chat.conftest import load_tokenizer
from tests.gateway.scripted import ScriptedEngine, run_turn
from tokentape._session.tree import Session
from tokentape.chat._renderer import PromptTokens, Renderer
from tokentape.chat._splice import History, StopMismatch
from tokentape.chat._template import ChatTemplate
from tokentape.engines._base import SamplingParams
from tokentape.errors import EngineError, InvalidRequest
from tokentape.gateway._events import TurnDone, TurnRequest
from tokentape.gateway._prompts import PromptBuilder
from tokentape.gateway._telemetry import Telemetry
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore, _rows
from tokentape.types import Provenance, SessionInfo, Turn

FIRST_REPLY = "<think>\nfirst thought\n</think>\n\nfirst answer<|im_end|>"
SECOND_REPLY = "second answer<|im_end|>"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Talk:
    """A session against a scripted engine."""

    def __init__(
        self,
        renderer: Renderer,
        path: Path,
        replies: Sequence[str],
        history: History = "sampled",
        stop_mismatch: StopMismatch = "keep",
    ) -> None:
        self.renderer = renderer
        self.engine = ScriptedEngine(renderer, replies)
        self.store = SqliteStore.open(path)
        # Python 3.13 warns of connections that are still open.
        weakref.finalize(self, self.store.close)
        self.turns = Turns(self.engine, renderer, self.store, history=history, stop_mismatch=stop_mismatch)

    def say(self, *messages: Any, n: int = 1, tools: tuple[Any, ...] = (), session: str = "s") -> list[Turn]:
        return asyncio.run(self._say(messages, n, tools, session))

    async def _say(self, messages: Sequence[Any], n: int, tools: tuple[Any, ...], session: str) -> list[Turn]:
        request = TurnRequest(session, tuple(messages), tools, {}, SamplingParams(max_tokens=0), n=n)
        return [event.turn async for event in run_turn(self.turns, request) if isinstance(event, TurnDone)]

    def recorded(self) -> tuple[Turn, ...]:
        return self.store.load_session("s").turns

    def text(self, ids: Any) -> str:
        return self.renderer.tokenizer.decode(ids)


def test_sampled_ids_stay_in_context_although_the_template_drops_them(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, [FIRST_REPLY, SECOND_REPLY])
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"))
    assert (second.parent, second.fork) == (0, None)
    assert "first thought" in talk.text(talk.engine.requests[1][0])


def test_shared_turn_data_is_in_memory_once(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, [FIRST_REPLY, SECOND_REPLY])
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"))
    assert first.setup is second.setup
    assert first.engine is second.engine


def test_template_history_starts_a_branch_with_the_exact_ids(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, [FIRST_REPLY, SECOND_REPLY], history="template")
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"))
    assert (second.parent, second.fork) == (None, "template_history")
    prompt, _ = talk.engine.requests[1]
    assert "first thought" not in talk.text(prompt)
    answer = renderer.tokenizer.encode_plain("first answer<|im_end|>")
    spliced = second.added_ids[second.added_provenance == Provenance.ASSISTANT]
    assert spliced.tolist() == first.completion_ids.tolist()[-len(answer) :]


def test_append_only_template_history_starts_no_branch(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, ["first answer<|im_end|>", SECOND_REPLY], history="template")
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"))
    assert (second.parent, second.fork) == (0, None)


def test_truncated_turn_that_template_history_continues_is_closed(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, ["first ans", SECOND_REPLY], history="template")
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"))
    assert (second.parent, second.fork) == (0, None)
    assert talk.text(second.added_ids[second.added_provenance == Provenance.CLOSE]) == "<|im_end|>"
    assert [trajectory.verdict for trajectory in talk.store.load_session("s").trajectories()] == ["closed"]


def test_edited_history_keeps_the_exact_sampled_ids(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, [FIRST_REPLY, SECOND_REPLY])
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a, edited"), first.reply, user("b"))
    assert (second.parent, second.fork) == (None, "edited_history")
    spliced = second.added_ids[second.added_provenance == Provenance.ASSISTANT]
    assert spliced.tolist() == first.completion_ids.tolist()
    assert talk.engine.requests[1][0] == second.added_ids.tolist()


def test_replies_are_looked_up_once_for_an_edited_history(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(renderer, tmp_path, [FIRST_REPLY, SECOND_REPLY, FIRST_REPLY])
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"))
    looked_up = Mock(side_effect=PromptBuilder._sampled_replies)
    monkeypatch.setattr(PromptBuilder, "_sampled_replies", lambda *args: looked_up(*args))
    (third,) = talk.say(user("a"), first.reply, user("b, edited"), second.reply, user("c"))
    assert third.added_provenance.tolist().count(Provenance.ASSISTANT) >= len(second.completion_ids)
    assert looked_up.call_count == 1


def test_a_message_that_the_client_wrote_gets_no_sampled_ids(renderer: Renderer, tmp_path: Path) -> None:
    """The first reply is "first answer" too, after reasoning that only the model's own turn may show."""
    talk = Talk(renderer, tmp_path, [FIRST_REPLY, SECOND_REPLY, SECOND_REPLY, SECOND_REPLY])
    (first,) = talk.say(user("a"))
    written = {"role": "assistant", "content": "first answer"}
    (second,) = talk.say(user("a"), first.reply, user("example"), written, user("b"))
    assert (second.parent, second.fork) == (0, None)
    assert "example<|im_end|>\n<|im_start|>assistant\nfirst answer<|im_end|>" in talk.text(second.added_ids)
    (subagent,) = talk.say(user("example"), written, user("b"))
    assert "thought" not in talk.text(subagent.added_ids)


THINKING = """{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{{ '' if thinking else '<think>\\n\\n</think>\\n\\n' }}{% endif -%}"""


def test_a_branch_with_thinking_keeps_the_earlier_turn_s_prompt(tmp_path: Path) -> None:
    talk = Talk(Renderer(load_tokenizer("qwen3"), ChatTemplate(THINKING)), tmp_path, [SECOND_REPLY, SECOND_REPLY])
    (first,) = talk.say(user("a"))
    messages = (user("a"), first.reply, user("b"))
    second = asyncio.run(_turn(talk.turns, TurnRequest("s", messages, (), {"thinking": True}, SamplingParams(0))))
    assert (second.parent, second.fork) == (None, "new_setup")
    context = [*first.added_ids.tolist(), *first.completion_ids.tolist()]
    assert "</think>" in talk.text(first.added_ids)
    assert second.added_ids.tolist()[: len(context)] == context
    assert talk.text(second.added_ids).endswith("<|im_start|>assistant\n")


async def _turn(turns: Turns, request: TurnRequest) -> Turn:
    (turn,) = [event.turn async for event in run_turn(turns, request) if isinstance(event, TurnDone)]
    return turn


def test_a_cut_short_reply_is_spliced_and_closed(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, ["first ans", SECOND_REPLY])
    (first,) = talk.say(user("a"))
    (second,) = talk.say({"role": "system", "content": "edited"}, user("a"), first.reply, user("b"))
    assert "first ans<|im_end|>\n<|im_start|>user\nb" in talk.text(second.added_ids.tolist())
    assert (second.added_provenance == Provenance.ASSISTANT).sum() >= len(first.completion_ids)


def test_reasoning_that_was_cut_short_is_closed_where_it_is_spliced(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, ["<think>\nstill thinking", SECOND_REPLY])
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("edited"), first.reply, user("b"))
    text = talk.text(second.added_ids.tolist())
    assert "<think>\nstill thinking\n</think>" in text
    assert text.index("</think>") < text.index("<|im_end|>\n<|im_start|>user\nb")


def test_reply_after_an_edit_keeps_its_exact_ids(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, [FIRST_REPLY, FIRST_REPLY.replace("first", "other"), SECOND_REPLY])
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"))
    (third,) = talk.say(user("a"), first.reply, user("b, edited"), second.reply, user("c"))
    assert (third.parent, third.fork) == (0, "branched")
    spliced = third.added_ids[third.added_provenance == Provenance.ASSISTANT]
    assert spliced.tolist() == second.completion_ids.tolist()
    assert talk.engine.requests[2][0][: len(first.added_ids) + len(first.completion_ids)] == [
        *first.added_ids.tolist(),
        *first.completion_ids.tolist(),
    ]


def test_equal_replies_of_a_branch_each_keep_their_own_ids(renderer: Renderer, tmp_path: Path) -> None:
    # The same text in two splits: equal as messages, but distinguished by their position.
    talk = Talk(renderer, tmp_path, ["answer<|im_end|>", "ok<|im_end|>", "answer<|im_end|>", SECOND_REPLY])
    talk.engine.split_next = True
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"))
    (third,) = talk.say(user("other"))
    assert first.completion_ids.tolist() != third.completion_ids.tolist()
    (fourth,) = talk.say(user("a"), first.reply, user("b, edited"), second.reply, user("c"))
    assert (fourth.parent, fourth.fork) == (0, "branched")
    context = [*first.added_ids.tolist(), *first.completion_ids.tolist()]
    assert talk.engine.requests[3][0][: len(context)] == context


OTHER_STOP = "first answer<|endoftext|>"


def test_stop_token_missing_from_the_template_ends_the_turn(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, [OTHER_STOP, SECOND_REPLY])
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"))
    assert (second.parent, second.fork) == (0, None)
    assert "first answer<|endoftext|>\n<|im_start|>user\nb" in talk.text(talk.engine.requests[1][0])


@pytest.mark.parametrize("history", ["sampled", "template"])
def test_stop_mismatch_fork_starts_a_branch_with_the_template_stop(
    renderer: Renderer, tmp_path: Path, history: History
) -> None:
    talk = Talk(renderer, tmp_path, [OTHER_STOP, SECOND_REPLY], history=history, stop_mismatch="fork")
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"))
    assert (second.parent, second.fork) == (None, "other_stop" if history == "sampled" else "template_history")
    assert "first answer<|im_end|>\n<|im_start|>user\nb" in talk.text(second.added_ids.tolist())
    spliced = second.added_ids[second.added_provenance == Provenance.ASSISTANT]
    assert spliced.tolist() == first.completion_ids.tolist()[:-1]
    assert first.completion_ids[-1] == renderer.tokenizer.encode_plain("<|endoftext|>")[0]


def test_template_stop_starts_no_branch(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, [OTHER_STOP, FIRST_REPLY, SECOND_REPLY], stop_mismatch="fork")
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"))
    (third,) = talk.say(user("a"), first.reply, user("b"), second.reply, user("c"))
    assert (third.parent, third.fork) == (1, None)
    session = Session(SessionInfo("s", 0.0), talk.recorded())
    assert [[turn.seq for turn in session.path(leaf)] for leaf in session.leaves()] == [[0], [1, 2]]


def test_full_rendering_does_not_block_other_calls(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered_in, render = [], Renderer.render

    def noting(*args: Any, **more: Any) -> PromptTokens:
        rendered_in.append(threading.current_thread())
        return render(*args, **more)

    monkeypatch.setattr(Renderer, "render", noting)
    talk = Talk(renderer, tmp_path, [FIRST_REPLY, OTHER_STOP, SECOND_REPLY], stop_mismatch="fork")
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"))
    (third,) = talk.say(user("a"), first.reply, user("b"), second.reply, user("c"))
    assert third.fork == "other_stop"
    assert len(rendered_in) == 2
    assert threading.main_thread() not in rendered_in


def test_telemetry_that_fails_loses_no_turn(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(renderer, tmp_path, [FIRST_REPLY, SECOND_REPLY])

    def failing(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(Telemetry, "recorded", failing)
        with pytest.raises(RuntimeError, match="new thread"):
            talk.say(user("a"))
    (first,) = talk.recorded()
    (second,) = talk.say(user("a"), first.reply, user("b"))
    assert (second.seq, second.parent) == (1, 0)


@pytest.mark.parametrize(("fail_after", "cause"), [(None, "shutdown"), (2, "engine_error")], ids=["aborted", "failed"])
def test_call_ends_only_after_its_sampled_ids_are_recorded(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_after: int | None, cause: str
) -> None:
    talk = Talk(renderer, tmp_path, [FIRST_REPLY])
    talk.engine.fail_after, talk.engine.error = fail_after, EngineError("broken")
    talk.engine.stall_after = 3
    write = SqliteStore.write

    async def aborted() -> Turn:
        writing, go_on = asyncio.Event(), asyncio.Event()

        async def slow(store: SqliteStore, *records: Any) -> None:
            writing.set()
            await go_on.wait()
            await write(store, *records)

        monkeypatch.setattr(SqliteStore, "write", slow)
        request = TurnRequest("s", (user("a"),), (), {}, SamplingParams(max_tokens=0), stream=True)
        events = run_turn(talk.turns, request)
        for _ in range(3):
            await anext(events)
        if fail_after is None:
            await asyncio.wait([asyncio.create_task(talk.turns.abort_all())], timeout=0.05)
        await writing.wait()
        await events.aclose()
        ending = asyncio.create_task(talk.turns.abort_all())
        await asyncio.wait([ending], timeout=0.05)
        assert not ending.done()
        go_on.set()
        await ending
        (turn,) = talk.recorded()
        return turn

    turn = asyncio.run(aborted())
    assert (turn.finish_reason, turn.abort_cause) == ("abort", cause)


def test_a_message_that_was_not_sampled_here_is_rendered_as_text(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, [FIRST_REPLY])
    (turn,) = talk.say(user("a"), {"role": "assistant", "content": "not mine"}, user("b"))
    assert turn.fork is None
    assistant_ids = turn.added_ids[turn.added_provenance == Provenance.ASSISTANT]
    assert talk.text(assistant_ids.tolist()) == "not mine"


def test_common_first_messages_are_rendered_once(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(renderer, tmp_path, [FIRST_REPLY, SECOND_REPLY, FIRST_REPLY, SECOND_REPLY])
    renderings: list[Any] = []
    render = renderer.render

    def counted(*args: Any, **named: Any) -> PromptTokens:
        renderings.append(args)
        return render(*args, **named)

    monkeypatch.setattr(renderer, "render", counted)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    swapped = {"function": {"parameters": {"properties": {}, "type": "object"}, "name": "f"}, "type": "function"}
    turns = [
        *talk.say(user("hi"), tools=(tool,)),
        *talk.say(user("hi"), tools=(tool,), session="other"),
        *talk.say(user("hi"), tools=(swapped,), session="keys in another order"),
        *talk.say(user("ho"), tools=(tool,), session="another question"),
    ]
    assert len(renderings) == 3
    for (messages, setup), turn in zip([renderings[0], *renderings], turns, strict=True):
        assert turn.added_ids.tolist() == render(messages, setup).ids.tolist()


def test_common_first_messages_are_stored_and_compressed_once(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressed, deflate = list[Any](), _rows._deflate_opening
    monkeypatch.setattr(_rows, "_deflate_opening", lambda value: compressed.append(value) or deflate(value))
    talk = Talk(renderer, tmp_path, [FIRST_REPLY] * 3)
    (first,), (second,) = (talk.say(user("a"), session=name) for name in ("s", "t"))
    (other,) = talk.say(user("b"), session="u")
    assert first.messages is second.messages
    assert compressed == [first.messages, other.messages]
    recorded = [talk.store.load_session(name).turns for name in ("s", "t", "u")]
    assert [setup.messages for (setup,) in recorded] == [(user("a"),), (user("a"),), (user("b"),)]


def test_other_tools_start_a_new_branch(renderer: Renderer, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    talk = Talk(renderer, tmp_path, [FIRST_REPLY, SECOND_REPLY])
    (first,) = talk.say(user("a"))
    (second,) = talk.say(user("a"), first.reply, user("b"), tools=(tool,))
    assert (second.parent, second.fork) == (None, "new_setup")


def test_choices_are_recorded_together_as_siblings(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, [FIRST_REPLY, SECOND_REPLY])
    assert len(talk.say(user("a"), n=2)) == 2
    assert [(turn.seq, turn.parent, turn.fork) for turn in talk.recorded()] == [(0, None, None), (1, None, "sibling")]


def test_if_one_choice_fails_all_are_recorded_as_aborted(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, ["ok<|im_end|>", "a longer reply than the other one<|im_end|>"])
    talk.engine.fail_after, talk.engine.error = 6, EngineError("gone")
    with pytest.raises(EngineError, match="gone"):
        talk.say(user("a"), n=2)
    turns = talk.recorded()
    assert [(turn.finish_reason, turn.abort_cause) for turn in turns] == [("abort", "engine_error")] * 2
    assert Session(SessionInfo("s", 0.0), turns).leaves() == []


def test_a_context_without_room_for_a_reply_is_refused(renderer: Renderer, tmp_path: Path) -> None:
    talk = Talk(renderer, tmp_path, [FIRST_REPLY])
    talk.engine.info = replace(talk.engine.info, max_context=5)
    with pytest.raises(InvalidRequest, match="> 4"):
        talk.say(user("a"))
