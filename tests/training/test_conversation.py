from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.chat.conftest import SMALL_TEMPLATES, load_renderer
from tests.chat.test_conversation import QUESTION, sampled
from tokentape.chat import Conversation, Renderer
from tokentape.errors import InvalidRequest
from tokentape.training import assemble, conversation_sample, padded, read_samples, write_samples
from tokentape.types import Provenance, TokenDistribution

PLAIN = TokenDistribution(penalties=False, temperature=1.0, truncation=False, grammar=False)
NEXT = {"role": "user", "content": "And 3 + 4?"}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return load_renderer(next(name for name in SMALL_TEMPLATES if "Qwen3.jinja" in name))


def conversation_of(renderer: Renderer, *, stopped: bool = True, check_bridges: bool = True) -> Conversation:
    """Return a conversation of two completions with logprobs -1, -2, ..."""
    conversation = Conversation(renderer, [QUESTION], check_bridges=check_bridges)
    for text in ("five", "seven"):
        ids = sampled(renderer, text, stopped=stopped)
        conversation.add_completion(ids, logprobs=[-1.0 - n for n in range(len(ids))])
        if text == "five":
            conversation.add_messages([NEXT])
    return conversation


def test_each_completion_is_a_turn_with_its_logprobs(renderer: Renderer) -> None:
    conversation = conversation_of(renderer)
    sample = conversation_sample(conversation, name="task", sampled_from=PLAIN, reward=1.0)
    assert (sample.session_id, sample.verdict, sample.turns, sample.reward) == ("task", "exact", (1, 3), 1.0)
    assert sample.finish_reasons == ("stop", "stop")
    for n, start, end in sample.completions():
        assert sample.token_ids[start:end].tolist() == conversation.sampled[n].tolist()
        assert sample.logprobs[start:end].tolist() == [-1.0 - k for k in range(end - start)]
        assert sample.loss_mask[start:end].all()
    assert sample.loss_mask.sum() == sum(map(len, conversation.sampled.values()))
    assert not sample.logprobs[~sample.loss_mask].any()


def test_a_file_and_a_batch_keep_the_sample(renderer: Renderer, tmp_path: Path) -> None:
    sample = conversation_sample(conversation_of(renderer), name="task", sampled_from=PLAIN, group="task")
    write_samples([sample], tmp_path / "samples.jsonl")
    (again,) = read_samples(tmp_path / "samples.jsonl")
    assert again.token_ids.tolist() == sample.token_ids.tolist()
    assert (again.verdict, again.turns, again.group, again.logprobs_of) == ("exact", (1, 3), "task", (PLAIN, PLAIN))
    batch = padded([again], pad_id=0, vocab_size=renderer.tokenizer.vocab_size)
    assert batch.logprobs[0].tolist() == sample.logprobs.tolist()
    assert len(assemble([sample]).samples) == 1


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"stopped": False}, "closed"),
        ({"check_bridges": False}, "exact, bridge unchecked"),
    ],
)
def test_the_verdict_says_what_was_not_exact(renderer: Renderer, change: dict[str, bool], verdict: str) -> None:
    sample = conversation_sample(conversation_of(renderer, **change), name="task", sampled_from=PLAIN)
    assert sample.verdict == verdict
    assert (Provenance.CLOSE in sample.provenance.tolist()) == ("stopped" in change)
    assert not sample.loss_mask[sample.provenance == Provenance.CLOSE].any()


def test_the_verdict_names_logprobs_of_another_distribution(renderer: Renderer) -> None:
    conversation = conversation_of(renderer)
    hot, cut = replace(PLAIN, temperature=0.7), replace(PLAIN, truncation=True)
    other = conversation_sample(conversation, name="task", sampled_from=hot, logprobs_of=PLAIN)
    assert other.verdict == "exact, other logprobs"
    with pytest.raises(InvalidRequest, match="the logprobs of turn 1"):
        padded([other], pad_id=0, vocab_size=renderer.tokenizer.vocab_size)
    assert conversation_sample(conversation, name="task", sampled_from=cut).verdict == "exact, supports not known"


def test_a_conversation_without_logprobs_is_refused(renderer: Renderer) -> None:
    conversation = Conversation(renderer, [QUESTION])
    with pytest.raises(InvalidRequest, match="no completion"):
        conversation_sample(conversation, name="task", sampled_from=PLAIN)
    conversation.add_completion(sampled(renderer, "five"))
    assert np.isnan(conversation.logprobs[conversation.loss_mask]).all()
    with pytest.raises(InvalidRequest, match=r"messages \[1\] have no logprobs"):
        conversation_sample(conversation, name="task", sampled_from=PLAIN)


def test_an_empty_last_completion_stays_a_turn_of_the_sample(renderer: Renderer) -> None:
    """Regression: the sample ended with the turn before, and counted as finished."""
    conversation = conversation_of(renderer)
    conversation.add_messages([NEXT])
    conversation.add_completion([], logprobs=[])
    made = conversation_sample(conversation, name="task", sampled_from=PLAIN)
    (sample,) = assemble([made]).samples
    assert (sample.turns, sample.leaf, sample.finish_reasons) == ((1, 3, 5), 5, ("stop", "stop", None))
    assert (sample.truncated, len(sample.token_ids)) == (None, len(made.token_ids))
