"""The ids that truncation kept, from the embedded engine through the record to a trainer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.gateway.scripted import run_turn
from tokentape._session.tree import NO_IDS
from tokentape._supports import SUPPORTS, kept_ids, pack
from tokentape.chat._parse import ReplyDelta
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import Engine, SampleDelta, SamplingParams
from tokentape.errors import InvalidRequest
from tokentape.gateway._choices import Choice
from tokentape.gateway._events import TurnDone, TurnRequest
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore, StoredSession, verify
from tokentape.training import assemble, exports, padded, renormalized_logprobs
from tokentape.training._collate import with_column
from tokentape.training._samples import Sample
from tokentape.types import TokenRows

TRUNCATED = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=3)


def two_turns(
    engine: Engine, renderer: Renderer, store: SqliteStore, supports: int, params: SamplingParams = TRUNCATED
) -> StoredSession:
    async def main() -> None:
        turns = Turns(engine, renderer, store, supports=supports)
        messages: list[Any] = []
        for text in ("What is 2+2?", "Sure?"):
            messages.append({"role": "user", "content": text})
            request = TurnRequest("s", tuple(messages), (), {}, params)
            (done,) = [event async for event in run_turn(turns, request) if isinstance(event, TurnDone)]
            messages.append(done.turn.reply)

    asyncio.run(main())
    return store.load_session("s", per_token=True)


def only_sample(stored: StoredSession) -> Sample:
    (sample,) = assemble(stored.trajectories()).samples
    return with_column(sample, "advantages", 1.0)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir).eval().requires_grad_(False)


def trainer_logprobs(model: Any, sample: Sample, vocabulary: int) -> tuple[Any, Any]:
    """What a loop over a batch computes for the trained tokens, and the recorded values."""
    batch = padded([sample], pad_id=0, vocab_size=vocabulary)
    logits = model(torch.from_numpy(batch.input_ids)).logits[:, :-1, :vocabulary]
    after = {name: torch.from_numpy(values) for name, values in batch.shifted().items()}
    rows = batch.payloads[SUPPORTS].rows[:, 1:]
    found = renormalized_logprobs(logits, after["target_ids"], rows, after["temperatures"])
    return found[after["loss_mask"]], after["logprobs"][after["loss_mask"]]


def test_a_trainer_computes_the_recorded_logprobs_over_the_recorded_supports(
    engine: Engine, renderer: Renderer, store: SqliteStore, model: Any, tmp_path: Path
) -> None:
    stored = two_turns(engine, renderer, store, 10_000)
    assert [turn.sampling["supports"] for turn in stored.turns] == ["all", "all"]
    sample = only_sample(stored)
    assert "," not in sample.verdict
    found, recorded = trainer_logprobs(model, sample, engine.info.vocab_size)
    assert len(found) == sum(len(turn.completion_ids) for turn in stored.turns)
    torch.testing.assert_close(found, recorded, atol=1e-5, rtol=0)
    assert verify(tmp_path / "data").ok


def test_supports_of_other_tokens_are_not_exported(engine: Engine, renderer: Renderer, store: SqliteStore) -> None:
    sample = only_sample(two_turns(engine, renderer, store, 10_000))
    rows = sample.payloads[SUPPORTS]
    at = int(np.flatnonzero(sample.loss_mask)[0])
    without = rows.rows.copy()
    kept = kept_ids(without[at])
    assert kept is not None
    without[at] = pack([token_id for token_id in kept if token_id != sample.token_ids[at]] or [0], 10_000)
    for damaged in (without, np.roll(rows.rows, 1), np.roll(rows.rows, -1)):
        planted = replace(sample, payloads={SUPPORTS: TokenRows(damaged, rows.known)})
        for export in (
            lambda sample: exports.slime_sample(sample, 0, 0),
            lambda sample: exports.prime_rl_training_sample(sample, "maths"),
            lambda sample: exports.skyrl_generator_output([replace(sample, reward=1.0)]),
        ):
            export(sample)
            with pytest.raises(InvalidRequest, match=r"not in the support|after truncation"):
                export(planted)


@pytest.mark.parametrize(("supports", "noted"), [(0, "none"), (1, "some")])
def test_truncation_without_all_supports_shows_in_the_verdict(
    engine: Engine, renderer: Renderer, store: SqliteStore, supports: int, noted: str
) -> None:
    stored = two_turns(engine, renderer, store, supports, replace(TRUNCATED, top_p=0.5))
    assert noted in {turn.sampling["supports"] for turn in stored.turns}
    sample = only_sample(stored)
    assert sample.verdict.endswith(", supports not known")
    with pytest.raises(InvalidRequest, match="--supports"):
        exports.slime_sample(sample, 0, 0)


def test_missing_supports_are_empty_bytes_once_a_support_is_reported() -> None:
    reader: Any = SimpleNamespace(feed=lambda ids: ReplyDelta())
    choice = Choice(0, TRUNCATED, reader, reader, NO_IDS)
    found = []
    for supports in ((), (b"a", b"b"), ()):
        choice.append(SampleDelta((1, 2), (-1.0, -1.0), supports=supports))
        found.append([*choice.supports])
    assert found == [[], [b"", b"", b"a", b"b"], [b"", b"", b"a", b"b", b"", b""]]


def test_supports_are_not_mentioned_without_truncation(engine: Engine, renderer: Renderer, store: SqliteStore) -> None:
    stored = two_turns(engine, renderer, store, 10_000, replace(TRUNCATED, top_p=1.0))
    assert all("supports" not in turn.sampling for turn in stored.turns)
    assert stored.payloads == ()
    assert "," not in stored.trajectories()[0].verdict
