"""Properties of each pair of template and tokenizer."""

from __future__ import annotations

import datetime

import numpy as np
import pytest

from tests.chat.conftest import EVERY_TEMPLATE, SMALL_TEMPLATES, load_renderer, renderer_of_kind, setup_for
from tests.chat.data import make_tokenizers
from tests.chat.oracle import CONVERSATIONS, by_transformers
from tokentape.chat._renderer import Renderer
from tokentape.errors import TemplateRefused

WITHOUT_ORACLE = {
    ("real/deepseek_v3/templates/DeepSeek-V3-Dec2024.jinja", "parallel calls"),
    ("real/deepseek_v31/templates/DeepSeek-R1-Distill.jinja", "parallel calls"),
    ("real/deepseek_v31/templates/DeepSeek-R1.jinja", "parallel calls"),
    ("real/deepseek_v31/templates/DeepSeek-R1.jinja", "tool"),
}
"""transformers raises a TypeError, since arguments are not text or content is missing; the renderer supplies both."""


def check_rendering(renderer: Renderer, name: str) -> None:
    """Compare ids with transformers' rendering, encoded by `tokenizers`. Refusals must agree.

    A call without content, as OpenAI's clients send it, has an empty text if the template needs text.
    """
    messages = CONVERSATIONS[name]
    setup = setup_for(renderer, date=datetime.date.today().isoformat())
    expected = by_transformers(renderer, messages)
    if expected is None:
        empty = [{**message, "content": message["content"] or ""} for message in messages]
        expected = by_transformers(renderer, empty)
    if expected is None:
        with pytest.raises(TemplateRefused):
            renderer.render(messages, setup)
    else:
        assert renderer.render(messages, setup).ids.tolist() == expected


@pytest.mark.sampled(24)
@pytest.mark.parametrize("template", EVERY_TEMPLATE)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_render_equals_transformers(template: str, name: str) -> None:
    if (template, name) in WITHOUT_ORACLE:
        assert by_transformers(load_renderer(template), CONVERSATIONS[name]) is None
    else:
        check_rendering(load_renderer(template), name)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("template", SMALL_TEMPLATES)
@pytest.mark.parametrize("kind", make_tokenizers.KINDS)
def test_render_equals_transformers_with_a_vocabulary_of_each_kind(template: str, kind: str) -> None:
    check_rendering(renderer_of_kind(template, kind), "several turns")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("template", EVERY_TEMPLATE)
def test_control_tokens_in_caller_text_stay_text(template: str) -> None:
    renderer = load_renderer(template)
    setup = setup_for(renderer)
    tokenizer = renderer.tokenizer
    control_ids = [control.id for control in tokenizer.controls]

    def count(text: str) -> np.ndarray:
        return np.bincount(
            renderer.render([{"role": "user", "content": text}], setup).ids, minlength=tokenizer.vocab_size
        )

    benign = count("a word b")[control_ids]
    for control in tokenizer.controls[:40] + tokenizer.controls[-8:]:
        for text in (f"a {control.content} b", control.content, control.content * 2, control.content[:-1]):
            assert (count(text)[control_ids] == benign).all()
