"""Bridges compared with the template's rendering of the real conversation: no false alarm, and no missed fault.

The expected text of the planted cases is that of transformers, which shares no code with the check.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.chat.conftest import CERTIFIED, REAL_TEMPLATES, SMALL_TEMPLATES, load_certificate, load_renderer
from tests.generator.conversations import Conversation, conversations
from tokentape.chat._bridge_check import check_bridge
from tokentape.chat._certification import written_turn
from tokentape.chat._renderer import PromptTokens, Renderer
from tokentape.chat._strategy import choose
from tokentape.chat._template import ChatTemplate
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Provenance, Setup, TokenIds


def talk(renderer: Renderer, many: int) -> list[Conversation]:
    """Return conversations without strings of the template, for which a certificate may be wrong."""
    controls = [control.content for control in renderer.tokenizer.controls[:40]]
    return conversations(lambda purpose: random.Random(f"3 {purpose}"), "", controls, range(many))


def completions(renderer: Renderer, setup: Setup, reply: Message, rng: random.Random) -> Iterator[TokenIds]:
    """Return samples of a reply: canonical ids, other ids, without the end, truncated."""
    written = written_turn(renderer, setup, reply)
    if written is None:
        return
    ids = renderer.tokenizer.encode_after_control(written[1]).ids
    if ids[-1] not in renderer.stop_ids(setup):
        # The model ends its turn with the next header's token, or the substitute vocabulary lacks the end token.
        stops = [control.id for control in renderer.tokenizer.controls if control.content in renderer.template.source]
        ends = [stop_id for stop_id in stops if stop_id in renderer.stop_ids(setup)]
        if not ends:
            return
        ids = [*ids, rng.choice(ends)]
    other: list[int] = []
    for token_id in ids:
        text = renderer.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        split = [] if renderer.tokenizer.control_by_id(token_id) or "\ufffd" in text or not text.isalpha() else text
        other += [token_id for c in split for token_id in renderer.tokenizer.encode_after_control(c).ids] or [token_id]
    for sampled in (ids, other, ids[:-1], ids[: rng.randrange(1, len(ids) + 1)]):
        yield renderer.tokenizer.array(sampled)


def bridged(
    template: str, many: int
) -> Iterator[tuple[Renderer, Setup, Conversation, Message, TokenIds, PromptTokens]]:
    """Yield every turn of these conversations that has a local bridge."""
    renderer, certificate = load_renderer(template), load_certificate(template)
    rng = random.Random(template)
    for conversation in talk(renderer, many):
        setup = renderer.setup(conversation.tools, {}, "2026-11-21")
        try:
            for ids in completions(renderer, setup, conversation.reply, rng):
                parser = renderer.parser(setup)
                parser.feed(ids.tolist())
                reply = parser.finish()[1].message()
                if bool(reply.get("tool_calls")) != bool(conversation.reply.get("tool_calls")):
                    continue  # a truncated call gets no result
                if choose(renderer, certificate, reply, conversation.new, setup, conversation.history) == "local":
                    yield (
                        renderer,
                        setup,
                        conversation,
                        reply,
                        ids,
                        renderer.bridge(ids, reply, conversation.new, setup),
                    )
        except TemplateRefused:
            continue


def alarms(template: str, many: int) -> tuple[list[Any], Counter[str]]:
    """Return the differences in locally bridged conversations, and the number of checks by outcome."""
    alarms, outcomes = [], Counter[str]()
    for renderer, setup, conversation, reply, ids, added in bridged(template, many):
        check = check_bridge(renderer, setup, conversation.history, reply, conversation.new, ids, added)
        outcomes[check.outcome] += 1
        if check.outcome == "differs":
            alarms.append((conversation.number, renderer.tokenizer.decode(ids), check))
    return alarms, outcomes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("template", CERTIFIED)
def test_local_bridges_raise_no_alarm(template: str) -> None:
    assert alarms(template, 6)[0] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("template", SMALL_TEMPLATES + REAL_TEMPLATES)
def test_local_bridges_of_200_conversations_raise_no_alarm(template: str) -> None:
    assert alarms(template, 200)[0] == []


def spoiled(renderer: Renderer, setup: Setup, ids: TokenIds, added: PromptTokens) -> Iterator[PromptTokens]:
    """Yield the bridge with a single fault: tokens dropped, doubled or inserted, at each end and within."""
    n = len(added.ids)
    if n < 3:
        return
    word = renderer.tokenizer.array(renderer.tokenizer.encode_after_control(" zebra").ids)
    codes = np.full(len(word), 2, np.uint8)

    def put(at: int, end: int, ids: TokenIds) -> PromptTokens:
        provenance = [added.provenance[:at], np.full(len(ids), 2, np.uint8), added.provenance[end:]]
        return PromptTokens(np.concatenate([added.ids[:at], ids, added.ids[end:]]), np.concatenate(provenance))

    yield PromptTokens(added.ids[1:], added.provenance[1:])
    yield PromptTokens(added.ids[:-1], added.provenance[:-1])
    yield put(n // 2, n // 2, word)
    yield put(0, 0, word)
    yield PromptTokens(np.concatenate([added.ids, word]), np.concatenate([added.provenance, codes]))
    if int(ids[-1]) in renderer.stop_ids(setup):
        yield put(0, 0, ids[-1:])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("template", CERTIFIED)
def test_wrong_bridge_is_detected(template: str) -> None:
    passed = []
    for renderer, setup, conversation, reply, ids, added in bridged(template, 3):
        if check_bridge(renderer, setup, conversation.history, reply, conversation.new, ids, added).outcome != "same":
            continue
        closing = set(added.ids[added.provenance == Provenance.CLOSE].tolist())
        if closing - set(renderer.stop_ids(setup)):
            continue  # the close of reasoning is within the turn
        for number, bad in enumerate(spoiled(renderer, setup, ids, added)):
            if bad.ids.tolist() != added.ids.tolist():
                bad_check = check_bridge(renderer, setup, conversation.history, reply, conversation.new, ids, bad)
                if bad_check.outcome == "same":
                    decode = renderer.tokenizer.decode
                    passed.append((conversation.number, number, decode(ids)[-80:], decode(bad.ids)[:80], bad_check))
    assert passed == []


PLANTED = {
    "by history": (
        "{%- if add_generation_prompt",
        "{%- if messages | length > 4 %}{{ 'LATE' }}{% endif -%}{%- if add_generation_prompt",
    ),
    "by a word": (
        "{%- if add_generation_prompt",
        "{%- if 'zebra' in (messages | tojson) %}{{ '<|im_start|>' }}{% endif -%}{%- if add_generation_prompt",
    ),
    "nothing": ("{%- if add_generation_prompt", "{%- if add_generation_prompt"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_bridge_check_agrees_with_transformers(renderer: Renderer, fault: str) -> None:
    old, new_text = PLANTED[fault]
    source = renderer.template.source.replace(old, new_text)
    served = Renderer(renderer.tokenizer, ChatTemplate(source))
    setup = served.setup((), {}, "2026-11-21")
    seen = set()
    for words in ("one", "zebra"):
        for rounds in (0, 1, 2):
            history: list[Message] = [{"role": "user", "content": words}]
            for _ in range(rounds):
                history += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and"}]
            reply: Message = {"role": "assistant", "content": "well"}
            ids = served.tokenizer.array(served.tokenizer.encode_plain("well<|im_end|>"))
            new: list[Message] = [{"role": "user", "content": "so"}]
            added = served.bridge(ids, reply, new, setup)
            whole = transformers_text(source, [*history, reply, *new])
            same = whole.endswith("well<|im_end|>" + served.tokenizer.decode(added.ids))
            assert (check_bridge(served, setup, history, reply, new, ids, added).outcome == "same") is same
            seen.add(same)
    assert seen == ({True} if fault == "nothing" else {True, False})


def transformers_text(source: str, messages: Sequence[Message]) -> str:
    texts, _ = render_jinja_template(
        conversations=[[dict(message) for message in messages]], chat_template=source, add_generation_prompt=True
    )
    return str(texts[0])
