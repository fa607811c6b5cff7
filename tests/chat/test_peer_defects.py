"""Defects of `renderers` 0.1.12, each reproduced as a test that Tokentape passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.chat.conftest import REAL_TEMPLATES, SMALL_TEMPLATES, call, load_renderer, result, setup_for, slow_unless
from tests.imports import loaded
from tests.records import make_turn
from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Provenance, SessionInfo, Setup, Trajectory

QWEN3 = "qwen3/templates/Qwen3.jinja"
GPT_OSS = "gpt_oss/templates/gpt-oss.jinja"

QUESTION: Message = {"role": "user", "content": "a question"}
NEXT: Message = {"role": "user", "content": "and another"}


def two_turns(renderer: Renderer, setup: Setup, reply: Message, completion: list[int], new: Message) -> Trajectory:
    """Return the trajectory of a turn with this completion and a turn after it."""
    sampled = renderer.tokenizer.array(completion)
    first = renderer.render([QUESTION], setup)
    bridge = renderer.bridge(sampled, reply, [new], setup)
    session = Session(SessionInfo("s", 0.0))
    parent = None
    for seq, added in enumerate((first, bridge)):
        logprobs = np.zeros(len(sampled), np.float32)
        parent = make_turn(
            "s",
            seq,
            parent,
            added_ids=added.ids,
            added_provenance=added.provenance,
            completion_ids=sampled,
            logprobs=logprobs,
        )
        session.add(parent)
    (trajectory,) = trajectories(session)
    return trajectory


def test_1_tokens_sampled_after_a_close_token_are_kept() -> None:
    """`renderers` cuts the turn at the last close token in it."""
    renderer = load_renderer(QWEN3)
    tokenizer = renderer.tokenizer
    completion = tokenizer.encode_plain("an answer<|im_end|> and then seven more tokens follow")
    reply = {"role": "assistant", "content": "an answer"}
    trajectory = two_turns(renderer, setup_for(renderer), reply, completion, NEXT)
    start = int(trajectory.completion_starts[0])
    end = start + len(completion)
    assert trajectory.token_ids[start:end].tolist() == completion
    assert trajectory.loss_mask[start:end].all()
    # The turn did not end with its close token, so it is closed again, and this close is not sampled.
    assert trajectory.token_ids[end] == tokenizer.encode_plain("<|im_end|>")[0]
    assert trajectory.provenance[end] == Provenance.CLOSE


@pytest.mark.parametrize(
    "spelled", ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_2_text_of_a_new_message_never_becomes_a_control_token(spelled: str, role: str) -> None:
    renderer = load_renderer(QWEN3)
    tokenizer, setup = renderer.tokenizer, setup_for(renderer)
    reply = {"role": "assistant", "content": "", "tool_calls": [call(7, {"a": 7})]}

    def controls(text: str) -> Counter[int]:
        new = result(7, text) if role == "tool" else {"role": "user", "content": text}
        ids = renderer.bridge(tokenizer.array(tokenizer.encode_plain("x<|im_end|>")), reply, [new], setup).ids.tolist()
        return Counter(i for i in ids if tokenizer.control_by_id(i) is not None)

    assert controls(f"say {spelled} twice: {spelled}") == controls("say nothing")


@pytest.mark.parametrize("template", [*SMALL_TEMPLATES, *map(slow_unless, REAL_TEMPLATES)])
def test_3_each_token_is_attributed_once_and_correctly(template: str) -> None:
    """`DefaultRenderer` renders prefixes. If a template rewrites them, it has more attributions than ids."""
    renderer = load_renderer(template)
    setup = setup_for(renderer, tools=())
    messages = [
        {"role": "user", "content": "aaaa"},
        {"role": "assistant", "content": "bbbb", "reasoning_content": "cccc"},
        {"role": "user", "content": "dddd"},
    ]
    rendered = renderer.render(messages, setup)
    assert rendered.provenance.shape == rendered.ids.shape
    user_text = renderer.tokenizer.decode(rendered.ids[rendered.provenance == Provenance.USER].tolist())
    assert user_text.replace(" ", "") == "aaaadddd"
    assert Provenance.SAMPLED not in rendered.provenance


def test_3_only_sampled_tokens_are_trained() -> None:
    """`DefaultRenderer` trained a user's turn."""
    renderer = load_renderer(QWEN3)
    completion = renderer.tokenizer.encode_plain("<think>\nwell\n</think>\n\nan answer<|im_end|>")
    reply = {"role": "assistant", "content": "an answer", "reasoning_content": "well"}
    trajectory = two_turns(renderer, setup_for(renderer), reply, completion, NEXT)
    assert trajectory.token_ids[trajectory.loss_mask].tolist() == completion * 2
    assert (trajectory.loss_mask == (trajectory.provenance == Provenance.SAMPLED)).all()


def conversation(turns: int) -> list[dict[str, Any]]:
    return [m for _ in range(turns) for m in (QUESTION, {"role": "assistant", "content": "ok"})] + [NEXT]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts of rendered messages and encoded characters."""
    done: Counter[str] = Counter()

    def count(owner: type, name: str, size: Callable[..., int]) -> None:
        wrapped = getattr(owner, name)

        def counting(self: object, *args: Any, **kwargs: Any) -> Any:
            done[f"{name} calls"] += 1
            done[f"{name} size"] += size(*args)
            return wrapped(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(ChatTemplate, "render", len)
    count(Tokenizer, "encode_marked", len)
    return done


def test_4_rendering_a_conversation_is_linear_in_its_length(work: Counter[str]) -> None:
    """`DefaultRenderer` renders every prefix: 22 s at 104k tokens."""
    renderer = load_renderer(QWEN3)
    setup = setup_for(renderer)
    renderer.format(setup)
    done = {}
    for turns in (5, 50):
        work.clear()
        renderer.render(conversation(turns), setup)
        done[turns] = Counter(work)
    for calls in ("render calls", "encode_marked calls"):
        assert done[5][calls] == done[50][calls]
    for size in ("render size", "encode_marked size"):
        assert done[50][size] <= 10 * done[5][size]


def test_4_a_bridge_costs_the_same_however_long_the_history_is(work: Counter[str]) -> None:
    renderer = load_renderer(QWEN3)
    setup = setup_for(renderer)
    completion = renderer.tokenizer.array(renderer.tokenizer.encode_plain("ok<|im_end|>"))
    renderer.format(setup)
    work.clear()
    renderer.bridge(completion, {"role": "assistant", "content": "ok"}, [NEXT], setup)
    assert work["render calls"] <= 2
    assert work["render size"] <= 2 * 3
    assert work["encode_marked calls"] == 1


def test_5_a_bridge_names_the_function_that_gpt_oss_called() -> None:
    """`renderers` writes `functions.unknown` if the result does not repeat the name."""
    renderer = load_renderer(GPT_OSS)
    tokenizer, setup = renderer.tokenizer, setup_for(renderer)
    completion = tokenizer.encode_plain('<|channel|>commentary to=functions.add <|message|>{"a":7}<|call|>')
    reply = {"role": "assistant", "content": None, "tool_calls": [call(7, '{"a":7}')]}
    unnamed = {"role": "tool", "tool_call_id": "call00007", "content": "8"}
    added = renderer.bridge(tokenizer.array(completion), reply, [unnamed], setup)
    assert tokenizer.decode(added.ids.tolist()).startswith("<|start|>functions.add to=assistant")


def test_5_a_sampled_call_header_counts_as_sampled() -> None:
    """`renderers` marks the recipient in the header as unsampled."""
    renderer = load_renderer(GPT_OSS)
    completion = renderer.tokenizer.encode_plain(' to=functions.add<|channel|>commentary<|message|>{"a":7}<|call|>')
    reply = {"role": "assistant", "content": None, "tool_calls": [call(7, '{"a":7}')]}
    trajectory = two_turns(renderer, setup_for(renderer), reply, completion, result(7))
    assert trajectory.token_ids[trajectory.provenance == Provenance.SAMPLED].tolist() == completion * 2


def test_6_nothing_undeclared_is_imported() -> None:
    """`renderers` imports httpx, which only older versions of openai bring along."""
    assert {"tokentape", "tokentape.gateway._app", "tokentape.cli"} <= loaded()
    assert not {"openai", "httpx"} & loaded()


def test_7_a_developer_message_is_refused_where_the_template_would_drop_it() -> None:
    renderer = load_renderer(QWEN3)
    setup = setup_for(renderer)
    developer = {"role": "developer", "content": "be brief"}
    completion = renderer.tokenizer.array(renderer.tokenizer.encode_plain("ok<|im_end|>"))
    with pytest.raises(TemplateRefused, match="developer"):
        renderer.render([developer, QUESTION], setup)
    with pytest.raises(TemplateRefused, match="developer"):
        renderer.bridge(completion, {"role": "assistant", "content": "ok"}, [developer, NEXT], setup)
