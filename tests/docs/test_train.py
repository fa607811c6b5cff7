"""The how-to's script, on sessions that the tiny model sampled through a gateway."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from tests.waiting import PATIENCE
from tokentape._session.arrow import write_parquet
from tokentape.client import Client
from tokentape.testing.samples import Row, check_samples
from tokentape.training._samples import Sample, Split, assemble, one_per_leaf, one_per_turn
from tokentape.training._trainers import TRAINERS

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train.md"


def test_page_matches_the_code_for_each_trainer() -> None:
    rows = [f"| {trainer.name} | {trainer.version} | `{trainer.formula}` |" for trainer in TRAINERS.values()]
    assert "\n".join(["", *rows, ""]) in PAGE.read_text()


@pytest.mark.parametrize("split", [one_per_leaf, one_per_turn])
def test_the_glue_for_other_trainers_keeps_ids_masks_and_logprobs(split: Split) -> None:
    (code,) = re.findall(r"<!-- executed by [\w/.]+: glue.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    glue: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), glue)

    def by_response(samples: Sequence[Sample]) -> Iterator[Row]:
        for parts in map(glue["split_response"], samples):
            context = [0.0] * len(parts["prompt"])
            yield Row([*parts["prompt"], *parts["response"]], context + parts["mask"], context + parts["logprobs"])

    def by_labels(samples: Sequence[Sample]) -> Iterator[Row]:
        for sample, row in zip(samples, map(glue["labeled"], samples), strict=True):
            on = np.array(row["labels"]) != -100
            logprobs = np.zeros(len(on), np.float32)
            logprobs[on] = sample.logprobs[sample.loss_mask]
            yield Row(np.where(on, row["labels"], row["input_ids"]), on, logprobs)

    for rows in (by_response, by_labels):
        report = check_samples(rows, samples=lambda paths: assemble(paths, split=split).samples)
        assert [name for name, found in report.goldens.items() if found] == ["sampled at 1.4, recorded at 1"]


def test_the_script_of_the_how_to_takes_a_step(gateway_url: str, model_dir: Path, tmp_path: Path) -> None:
    paths = []
    with Client(gateway_url) as client:
        for number, reward in enumerate([0.0, 1.0]):
            session = client.session(metadata={"task": 7})
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"What is {number} + 4?"}]
            for _ in range(2):
                body: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 24, "seed": number}
                body["temperature"] = 0.8 + 0.6 * number
                answer = httpx2.post(f"{session.base_url}/chat/completions", json=body, timeout=PATIENCE).json()
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
            session.reward(reward)
            paths += session.trajectories()
    write_parquet(paths, tmp_path / "rollouts.parquet")
    (script,) = re.findall(r"<!-- executed by [\w/.]+: train.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    script = script.replace("path/to/model", str(model_dir)).replace(
        '"rollouts.parquet"', repr(str(tmp_path / "rollouts.parquet"))
    )
    ran: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(script, str(PAGE), "exec"), ran)
    samples: list[Sample] = ran["samples"]
    assert len(samples) == 2
    assert ran["mask"].sum() == sum(len(path.token_ids[path.loss_mask]) for path in paths) > 8
    # The trainer sees the ids that were sampled, so its logprobs are the recorded ones.
    torch.testing.assert_close(ran["ratio"][ran["mask"]], torch.ones(int(ran["mask"].sum())), atol=2e-3, rtol=0)
    assert torch.isfinite(ran["loss"])
    assert len(script.splitlines()) <= 42
