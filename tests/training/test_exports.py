"""Exports, compared with the lists of fields, and with the trainers' classes in interpreters that have them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.session.builders import assistant, make_turn, user
from tests.training.interpreters import answered
from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.errors import InvalidRequest
from tokentape.training import exports
from tokentape.training._collate import with_column
from tokentape.training._samples import Sample, assemble
from tokentape.types import FinishReason, MediaSpan, Reward, SessionInfo


def two_branches() -> list[Sample]:
    """1 2 | 3 4 | 5 | 6 7, and 1 2 | 3 4 | 8 | 9, of which the second sample trains only 9."""
    session = Session(
        SessionInfo("s", 0.0, {"task": 7}),
        [
            make_turn(0, None, [user("a")], assistant("A"), added=[1, 2], completion=[3, 4]),
            make_turn(1, 0, [user("b")], assistant("B"), added=[5], completion=[6, 7]),
            make_turn(2, 0, [user("c")], assistant("C"), added=[8], completion=[9], fork="branched"),
        ],
    )
    rewards = [Reward("s", None, 1.0, 0.0), Reward("s", 0, 0.25, 0.0)]
    return [
        with_column(sample, "advantages", 0.5)
        for sample in assemble(trajectories(session, rewards), group="task").samples
    ]


def ended(reason: FinishReason | None) -> Sample:
    """Return the first branch, with its last turn ended by `reason`."""
    return replace(two_branches()[0], finish_reasons=("stop", reason))


def test_trl_rollouts_split_at_the_first_sampled_token() -> None:
    assert exports.trl_rollouts(two_branches()) == {
        "prompt_ids": [[1, 2], [1, 2]],
        "completion_ids": [[3, 4, 5, 6, 7], [3, 4, 8, 9]],
        "logprobs": [[-0.5, -0.5, 0.0, -0.5, -0.5], [-0.5, -0.5, 0.0, -0.5]],
        "env_mask": [[1, 1, 0, 1, 1], [0, 0, 0, 1]],
    }


def test_verl_s_agent_loop_gets_prompt_response_and_mask() -> None:
    fields = exports.verl_agent_loop_output(two_branches()[1])
    assert fields["prompt_ids"] == [1, 2]
    assert fields["response_ids"] == [3, 4, 8, 9]
    assert fields["response_mask"] == [0, 0, 0, 1]
    assert fields["reward_score"] == 1.0
    assert fields["num_turns"] == 2
    extra = fields["extra_fields"]
    assert (extra["min_global_steps"], extra["max_global_steps"], extra["reward_extra_info"]) == (1, 1, {})


def test_verl_s_agent_loop_gets_weight_steps_of_trained_tokens() -> None:
    sample = replace(two_branches()[0], weight_spans=((2, 3, "7"), (3, 4, "9"), (5, 7, "step-1")))
    extra = exports.verl_agent_loop_output(sample)["extra_fields"]
    assert (extra["min_global_steps"], extra["max_global_steps"]) == (None, None)
    extra = exports.verl_agent_loop_output(sample, global_steps=8)["extra_fields"]
    assert (extra["min_global_steps"], extra["max_global_steps"]) == (7, 9)
    extra = exports.verl_agent_loop_output(sample, response_length=2)["extra_fields"]
    assert (extra["min_global_steps"], extra["max_global_steps"], extra["truncated"]) == (7, 9, True)


def test_verl_s_response_is_truncated_and_its_prompt_is_not() -> None:
    fields = exports.verl_agent_loop_output(two_branches()[0], prompt_length=2, response_length=3)
    assert (fields["prompt_ids"], fields["response_ids"], fields["response_mask"]) == ([1, 2], [3, 4, 5], [1, 1, 0])
    assert fields["response_logprobs"] == [-0.5, -0.5, 0.0]
    tensors = exports.verl_data_proto(two_branches(), pad_id=0, vocab_size=100, prompt_length=3, response_length=4)[
        "tensors"
    ]
    assert tensors["input_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 8, 9]]
    assert tensors["rm_scores"].tolist() == [[0, 0, 0, 1], [0, 0, 0, 1]]
    for export in (
        lambda: exports.verl_agent_loop_output(two_branches()[0], prompt_length=1),
        lambda: exports.verl_data_proto(two_branches(), pad_id=0, vocab_size=100, prompt_length=1),
    ):
        with pytest.raises(InvalidRequest, match="the prompt of session 's' has 2 tokens"):
            export()


def test_verl_s_batch_without_rewards_has_no_reward_tensor() -> None:
    samples = [_without_reward(sample) for sample in two_branches()]
    assert "rm_scores" not in exports.verl_data_proto(samples, pad_id=0, vocab_size=100)["tensors"]
    with pytest.raises(InvalidRequest, match="no reward"):
        exports.verl_data_proto([replace(sample, columns={}) for sample in samples], pad_id=0, vocab_size=100)


def test_images_are_refused() -> None:
    sample = replace(two_branches()[0], media=(MediaSpan(0, 1, "a", "b"),))
    for export in (
        lambda: exports.trl_rollouts([sample]),
        lambda: exports.verl_agent_loop_output(sample),
        lambda: exports.verl_data_proto([sample], pad_id=0, vocab_size=100),
        lambda: exports.slime_sample(sample, 0, 0),
        lambda: exports.prime_rl_training_sample(sample, "maths"),
        lambda: exports.verifiers_nodes([sample]),
        lambda: exports.skyrl_generator_output([sample]),
        lambda: exports.nemo_rl_datum(sample, 0),
        lambda: exports.tinker_datum(sample),
        lambda: exports.tinker_datum(sample, advantages=None),
        lambda: exports.agent_lightning_triplets(sample),
    ):
        with pytest.raises(InvalidRequest, match="pixels"):
            export()


def test_verl_s_batch_has_prompts_on_the_left_and_responses_on_the_right() -> None:
    made = exports.verl_data_proto(two_branches(), pad_id=0, vocab_size=100)
    tensors = made["tensors"]
    assert tensors["prompts"].tolist() == [[1, 2], [1, 2]]
    assert tensors["responses"].tolist() == [[3, 4, 5, 6, 7], [3, 4, 8, 9, 0]]
    assert tensors["attention_mask"].tolist() == [[1] * 7, [1] * 6 + [0]]
    assert tensors["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 0]]
    assert tensors["response_mask"].tolist() == [[1, 1, 0, 1, 1], [0, 0, 0, 1, 0]]
    assert tensors["rm_scores"].tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 1, 0]]
    assert tensors["advantages"].tolist() == [[0.5, 0.5, 0, 0.5, 0.5], [0, 0, 0, 0.5, 0]]
    assert made["non_tensors"]["uid"].tolist() == ["7", "7"]
    assert made["non_tensors"]["batch_key"].tolist() == ["7_0_0", "7_0_1"]


def test_slime_gets_response_lengths_and_masks_of_the_response() -> None:
    made = exports.slime_sample(two_branches()[0], 3, 1, decode=lambda ids: f"{len(ids)} ids")
    assert (made["tokens"], made["response_length"], made["response"]) == ([1, 2, 3, 4, 5, 6, 7], 5, "5 ids")
    assert made["loss_mask"] == [1, 1, 0, 1, 1]
    assert len(made["rollout_log_probs"]) == 5
    assert made["weight_versions"] == ["1", "1"]
    assert made["metadata"] == {"task": 7, "session_id": "s"}
    assert (made["session_id"], made["status"]) == ("s", "completed")
    assert exports.slime_sample(ended("length"), 0, 0)["status"] == "truncated"


def test_samples_of_a_session_share_a_slime_rollout() -> None:
    first, second = (exports.slime_sample(sample, n, 0)["rollout_id"] for n, sample in enumerate(two_branches()))
    other = exports.slime_sample(replace(two_branches()[0], session_id="t"), 2, 0)["rollout_id"]
    assert first == second != other


def test_prime_rl_arrays_are_aligned_with_the_ids() -> None:
    made = exports.prime_rl_training_sample(two_branches()[0], "maths")
    assert {len(made[name]) for name in ("token_ids", "mask", "logprobs", "temperatures", "advantages")} == {7}
    assert made["mask"] == [False, False, True, True, False, True, True]


def test_verifiers_nodes_share_turns_and_have_logprobs_of_trained_tokens_only() -> None:
    nodes = exports.verifiers_nodes(two_branches())
    assert [node["token_ids"] for node in nodes] == [[1, 2], [3, 4], [5], [6, 7], [8], [9]]
    assert [node["parent"] for node in nodes] == [None, 0, 1, 2, 1, 4]
    assert [len(node["logprobs"]) for node in nodes] == [0, 2, 0, 2, 0, 1]
    assert nodes[5]["advantages"] == [0.5]


def test_verifiers_nodes_are_trained_if_any_sample_trains_them() -> None:
    nodes = exports.verifiers_nodes(two_branches()[::-1])
    assert [node["token_ids"] for node in nodes if all(node["mask"])] == [[3, 4], [9], [6, 7]]


def test_samples_of_several_sessions_are_refused_for_a_trace() -> None:
    (first, _), (other, _) = two_branches(), two_branches()
    object.__setattr__(other, "session_id", "t")
    with pytest.raises(InvalidRequest, match="several"):
        exports.verifiers_nodes([first, other])


def test_skyrl_gets_a_reward_per_sample_or_per_token() -> None:
    assert exports.skyrl_generator_output(two_branches())["rewards"] == [1.0, 1.0]
    made = exports.skyrl_generator_output(two_branches(), per_token="advantages")
    assert made["rewards"] == [[0.5, 0.5, 0.0, 0.5, 0.5], [0.0, 0.0, 0.0, 0.5]]
    assert made["loss_masks"] == [[1, 1, 0, 1, 1], [0, 0, 0, 1]]


def test_skyrl_s_branches_are_steps_of_the_same_trajectory() -> None:
    samples = two_branches()
    made = exports.skyrl_generator_output([*samples, replace(samples[0], session_id="t")])
    assert made["is_last_step"] == [False, True, True]
    assert made["trajectory_ids"] == [{"instance_id": "7", "repetition_id": n} for n in (0, 0, 1)]
    assert made["stop_reasons"] == ["stop"] * 3
    assert exports.skyrl_generator_output([ended("length"), ended(None)])["stop_reasons"] is None
    assert exports.skyrl_generator_output([ended("length")])["stop_reasons"] == ["length"]
    with pytest.raises(InvalidRequest, match="are interleaved"):
        exports.skyrl_generator_output([samples[0], replace(samples[0], session_id="t"), samples[1]])


def test_nemo_rl_s_assistant_messages_are_the_trained_tokens() -> None:
    log = exports.nemo_rl_datum(two_branches()[1], 0)["message_log"]
    assert [(message["role"], message["token_ids"].tolist()) for message in log] == [
        ("user", [1, 2]),
        ("environment", [3, 4, 8]),
        ("assistant", [9]),
    ]
    first = exports.nemo_rl_datum(two_branches()[0], 0)["message_log"]
    assert [message["role"] for message in first] == ["user", "assistant", "environment", "assistant"]
    assert first[1]["generation_logprobs"].tolist() == [-0.5, -0.5]


def test_nemo_rl_s_length_is_the_prompt_length() -> None:
    made = [exports.nemo_rl_datum(sample, 0) for sample in two_branches()]
    assert [datum["length"] for datum in made] == [2, 2]
    assert [datum["truncated"] for datum in (made[0], exports.nemo_rl_datum(ended("length"), 0))] == [False, True]
    assert made[0]["message_log"][0]["token_ids"].dtype == torch.int64
    assert isinstance(exports.nemo_rl_datum(ended("stop"), 0, tensors=False)["message_log"][0]["token_ids"], np.ndarray)


def test_tinker_s_targets_are_shifted_by_1() -> None:
    made = exports.tinker_datum(two_branches()[1])
    assert made["tokens"] == [1, 2, 3, 4, 8]
    assert made["loss_fn_inputs"]["target_tokens"].tolist() == [2, 3, 4, 8, 9]
    assert made["loss_fn_inputs"]["logprobs"].tolist() == [0, 0, 0, 0, -0.5]
    assert made["loss_fn_inputs"]["advantages"].tolist() == [0, 0, 0, 0, 0.5]
    inputs = exports.tinker_datum(two_branches()[1], advantages=None)["loss_fn_inputs"]
    assert inputs["target_tokens"].tolist() == [2, 3, 4, 8, 9]
    assert inputs["weights"].tolist() == [0, 0, 0, 0, 1]


def test_agent_lightning_gets_a_triplet_per_trained_turn() -> None:
    first, second = map(exports.agent_lightning_triplets, two_branches())
    assert [triplet["prompt"]["token_ids"] for triplet in first] == [[1, 2], [1, 2, 3, 4, 5]]
    assert [triplet["reward"] for triplet in first] == [0.25, 1.0]
    assert [triplet["response"]["token_ids"] for triplet in second] == [[9]]
    # The names of 0.3 and of 1.0.
    assert second[0]["response"]["logprobs"] == second[0]["response"]["log_probs"] == [-0.5]


def test_agent_lightning_refuses_a_last_reward_unlike_the_session_s() -> None:
    first = replace(two_branches()[0], turn_rewards=np.array([0.25, 0.5]))
    with pytest.raises(InvalidRequest, match=r"reward 1, but its last trained turn has 0\.5"):
        exports.agent_lightning_triplets(first)
    for rewards in ({"reward": None}, {"turn_rewards": np.array([0.25, 1.0])}):
        triplets = exports.agent_lightning_triplets(replace(first, **rewards))
        assert triplets[-1]["reward"] == (0.5 if "reward" in rewards else 1.0)


def test_turn_without_sampled_tokens_gives_no_triplet() -> None:
    session = Session(
        SessionInfo("s", 0.0, {}),
        [
            make_turn(0, None, [user("a")], assistant("A"), added=[1, 2], completion=[3, 4]),
            make_turn(1, 0, [user("b")], assistant(""), added=[5], completion=[]),
        ],
    )
    (sample,) = assemble(trajectories(session)).samples
    assert [triplet["response"]["token_ids"] for triplet in exports.agent_lightning_triplets(sample)] == [[3, 4]]


def test_nan_advantages_of_trained_tokens_are_refused() -> None:
    first = two_branches()[0]
    part = first.columns["advantages"].copy()
    part[5:] = np.nan
    partly = replace(first, columns={"advantages": part})
    for export in (
        lambda: exports.tinker_datum(partly),
        lambda: exports.prime_rl_training_sample(partly, "env"),
        lambda: exports.verl_data_proto([partly], pad_id=0, vocab_size=100),
        lambda: exports.verifiers_nodes([partly]),
        lambda: exports.skyrl_generator_output([partly], per_token="advantages"),
    ):
        with pytest.raises(InvalidRequest, match="for 2 trained tokens"):
            export()
    context = np.where(first.loss_mask, np.float32(0.5), np.float32(np.nan))
    assert exports.tinker_datum(replace(first, columns={"advantages": context}))


def test_skyrl_gets_empty_lists_for_no_samples() -> None:
    made = exports.skyrl_generator_output([])
    assert {name: value for name, value in made.items() if value} == {}
    assert made["prompt_token_ids"] == made["is_last_step"] == []


def test_missing_rewards_and_columns_are_refused() -> None:
    sample = two_branches()[0]
    for export in (exports.skyrl_generator_output, lambda samples: exports.nemo_rl_datum(samples[0], 0)):
        with pytest.raises(InvalidRequest, match="no reward"):
            export([_without_reward(sample)])
    with pytest.raises(InvalidRequest, match="no column 'credit'"):
        exports.tinker_datum(sample, advantages="credit")


def _without_reward(sample: Sample) -> Sample:
    object.__setattr__(sample, "reward", None)
    return sample


def exported() -> dict[str, list[Any]]:
    samples = two_branches()
    other = replace(samples[0], session_id="t", reward=0.0)
    proto = exports.verl_data_proto([*samples, other], pad_id=0, vocab_size=100)
    plain = {kind: {name: array.tolist() for name, array in proto[kind].items()} for kind in ("tensors", "non_tensors")}
    data = [exports.tinker_datum(sample) for sample in samples]
    return {
        "tinker": [
            {**datum, "loss_fn_inputs": {name: values.tolist() for name, values in datum["loss_fn_inputs"].items()}}
            for datum in data
        ],
        "verifiers": exports.verifiers_nodes(samples),
        "prime_rl": [exports.prime_rl_training_sample(sample, "maths") for sample in samples],
        "slime": [exports.slime_sample(sample, n, 0) for n, sample in enumerate(samples)],
        "miles": [exports.slime_sample(sample, n, 0) for n, sample in enumerate(samples)],
        "verl": [*(exports.verl_agent_loop_output(sample) for sample in samples), plain],
        "agent_lightning": [triplet for sample in samples for triplet in exports.agent_lightning_triplets(sample)],
    }


@cache
def built(trainer: str) -> list[Any]:
    """Return the contents of the trainer's objects."""
    objects: list[Any] = answered(trainer, "trainer_classes", exported()[trainer])
    return objects


@pytest.mark.differential
def test_tinker_takes_the_data() -> None:
    first, second = built("tinker")
    assert first["length"] == 6
    assert second["target_tokens"] == [2, 3, 4, 8, 9]
    assert second["advantages"] == [0, 0, 0, 0, 0.5]


@pytest.mark.differential
def test_verifiers_branch_equals_the_sample() -> None:
    for branch, sample in zip(built("verifiers"), two_branches(), strict=True):
        assert branch["token_ids"] == sample.token_ids.tolist()
        assert branch["sampled_mask"][4:] == sample.loss_mask[4:].tolist()
        assert branch["logprobs"] == sample.logprobs.tolist()


@pytest.mark.differential
def test_prime_rl_takes_the_fields() -> None:
    for made, sample in zip(built("prime_rl"), two_branches(), strict=True):
        assert made["token_ids"] == sample.token_ids.tolist()
        assert made["advantages"] == sample.columns["advantages"].tolist()


@pytest.mark.differential
@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_slime_and_miles_take_the_fields(trainer: str) -> None:
    assert [sample["trained"] for sample in built(trainer)] == [4, 1]


@pytest.mark.differential
def test_verl_takes_outputs_and_batches() -> None:
    first, second, batch = built("verl")
    assert second["responses"] == [3, 4, 8, 9]
    assert second["response_mask"] == [0, 0, 0, 1]
    assert first["rm_scores"] == [0, 0, 0, 0, 1]
    assert (batch["rows"], batch["uid"]) == (3, ["7"] * 3)
    # Two sessions, with rewards 1 and 0: verl divides by the standard deviation of a sample.
    assert batch["advantages"] == pytest.approx([0.5**0.5, 0.5**0.5, -(0.5**0.5)], abs=1e-5)
    assert batch["of_every_sample"] != pytest.approx(batch["advantages"], abs=0.1)


@pytest.mark.differential
def test_agent_lightning_takes_the_triplets() -> None:
    assert [triplet["response"]["token_ids"] for triplet in built("agent_lightning")] == [[3, 4], [6, 7], [9]]
