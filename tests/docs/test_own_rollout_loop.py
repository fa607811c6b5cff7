"""The how-to's loop, run with the demo model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokentape.demo import MODEL
from tokentape.training._logprob_check import LogprobLimits, check_logprobs, forward_pass

pytest.importorskip("torch", reason="needs torch")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-rollout-loop.md"
TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Return the price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}


def test_the_loop_keeps_what_was_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = dict(re.findall(r"<!-- executed by [\w/.]+: (\w+) -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    names: dict[str, object] = {}
    for name in ("loop", "arrays", "trained"):
        exec(blocks[name].replace("path/to/model", str(MODEL)), names)
    conversation = names["conversation"]
    assert conversation.loss_mask.sum() == len(conversation.sampled[1]) > 0
    report = check_logprobs([names["trained"]], forward=forward_pass(str(MODEL)))
    assert (report.numeric.tokens, report.failures(LogprobLimits())) == (conversation.loss_mask.sum(), [])
    assert names["batch"].loss_mask.sum() == conversation.loss_mask.sum()

    completions = []
    sample = names["sample"]

    def recorded(token_ids: object, stop_ids: object) -> tuple[list[int], list[float]]:
        completion, logprobs = sample(token_ids, stop_ids)
        completions.append(completion)
        return completion, logprobs

    names["sample"] = recorded
    question = [{"role": "user", "content": "What is the price of a lamp?"}]
    conversation = names["rollout"](question, [TOOL], run_tool=lambda call: "12", most_turns=3)
    sampled = conversation.token_ids[conversation.loss_mask].tolist()
    assert sampled == [token_id for completion in completions for token_id in completion]
