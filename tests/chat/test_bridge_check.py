"""Bridges compared with the template's rendering of the real conversation: no false alarm, and no fault passed over.

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
from tokentape.gateway._recording import reply_message
from tokentape.types import Message, Provenance, Setup, TokenIds


def talk(renderer: Renderer, many: int) -> list[Conversation]:
    """Conversations in which nothing repeats a string of the template's: on those a certificate may be wrong."""
    controls = [control.content for control in renderer.tokenizer.controls[:40]]
    return conversations(lambda purpose: random.Random(f"3 {purpose}"), "", controls, range(many))


def completions(renderer: Renderer, setup: Setup, reply: Message, rng: random.Random) -> Iterator[TokenIds]:
    """What a model samples for a reply: as the tokenizer splits it, in other ids, without its end, cut short."""
    written = written_turn(renderer, setup, reply)
    if written is None:
        return
    ids = renderer.tokenizer.encode_after_control(written[1]).ids
    if ids[-1] not in renderer.stop_ids(setup):
        # The model ends its turn with the next header's token, or the vocabulary stands in for one that has the end.
        stops = [one.id for one in renderer.tokenizer.controls if one.content in renderer.template.source]
        ends = [one for one in stops if one in renderer.stop_ids(setup)]
        if not ends:
            return
        ids = [*ids, rng.choice(ends)]
    other: list[int] = []
    for token_id in ids:
        text = renderer.tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        split = [] if renderer.tokenizer.control_by_id(token_id) or "\ufffd" in text or not text.isalpha() else text
        other += [one for c in split for one in renderer.tokenizer.encode_after_control(c).ids] or [token_id]
    for sampled in (ids, other, ids[:-1], ids[: rng.randrange(1, len(ids) + 1)]):
        yield renderer.tokenizer.array(sampled)


def bridged(
    template: str, many: int
) -> Iterator[tuple[Renderer, Setup, Conversation, Message, TokenIds, PromptTokens]]:
    """Every turn of these conversations that the certificate has bridged locally."""
    renderer, certificate = load_renderer(template), load_certificate(template)
    rng = random.Random(template)
    for one in talk(renderer, many):
        setup = renderer.setup(one.tools, {}, "2026-11-21")
        try:
            for ids in completions(renderer, setup, one.reply, rng):
                parser = renderer.parser(setup)
                parser.feed(ids.tolist())
                reply = reply_message(parser.finish()[1])
                if bool(reply.get("tool_calls")) != bool(one.reply.get("tool_calls")):
                    continue  # nobody answers a call that was cut short
                if choose(renderer, certificate, reply, one.new, setup, one.history) == "local":
                    yield renderer, setup, one, reply, ids, renderer.bridge(ids, reply, one.new, setup)
        except TemplateRefused:
            continue


def alarms(template: str, many: int) -> tuple[list[Any], Counter[str]]:
    """The differences found in conversations bridged locally, and how many checks had which outcome."""
    found, outcomes = [], Counter[str]()
    for renderer, setup, one, reply, ids, added in bridged(template, many):
        check = check_bridge(renderer, setup, one.history, reply, one.new, ids, added)
        outcomes[check.outcome] += 1
        if check.outcome == "differs":
            found.append((one.number, renderer.tokenizer.decode(ids), check))
    return found, outcomes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("template", CERTIFIED)
def test_what_is_certified_local_raises_no_alarm(template: str) -> None:
    assert alarms(template, 6)[0] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("template", SMALL_TEMPLATES + REAL_TEMPLATES)
def test_nor_do_200_conversations(template: str) -> None:
    assert alarms(template, 200)[0] == []


def spoiled(renderer: Renderer, setup: Setup, ids: TokenIds, added: PromptTokens) -> Iterator[PromptTokens]:
    """The bridge with one fault each: something dropped, doubled, put in, at each end and within."""
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
def test_a_spoiled_bridge_is_not_passed_over(template: str) -> None:
    passed = []
    for renderer, setup, one, reply, ids, added in bridged(template, 3):
        if check_bridge(renderer, setup, one.history, reply, one.new, ids, added).outcome != "same":
            continue
        closing = set(added.ids[added.provenance == Provenance.CLOSE].tolist())
        if closing - set(renderer.stop_ids(setup)):
            continue  # how reasoning is closed is within the turn
        for number, bad in enumerate(spoiled(renderer, setup, ids, added)):
            if bad.ids.tolist() != added.ids.tolist():
                found = check_bridge(renderer, setup, one.history, reply, one.new, ids, bad)
                if found.outcome == "same":
                    decode = renderer.tokenizer.decode
                    passed.append((one.number, number, decode(ids)[-80:], decode(bad.ids)[:80], found))
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
def test_it_says_what_transformers_says(renderer: Renderer, fault: str) -> None:
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
