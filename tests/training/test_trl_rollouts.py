"""A rollout function, without a trainer, for sessions that are not a single clean sequence."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.waiting import PATIENCE
from tokentape.client import Client, ClientSession
from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.training._samples import DropRetries
from tokentape.training.trl import GatewayRollouts, Row, carry_rows, correct_by_recorded_logprobs, recorded_reward
from tokentape.training.trl._agents import row_of


@pytest.fixture
def client(gateway_url: str) -> Iterator[Client]:
    with Client(gateway_url) as client:
        yield client


def trainer(**changed: Any) -> Any:
    """Return the parts of a trainer that a rollout function reads."""
    attributes = {
        "temperature": 1.0,
        "num_generations": 2,
        "num_generations_eval": 1,
        "model": SimpleNamespace(training=True),
        "state": SimpleNamespace(global_step=7),
    }
    return SimpleNamespace(**{**attributes, **changed})


def ask(session: ClientSession, text: str, *before: dict[str, Any]) -> dict[str, Any]:
    messages = [*before, {"role": "user", "content": text}]
    body = {"model": "any", "messages": messages, "max_tokens": 4, "seed": 1}
    answer = httpx2.post(f"{session.base_url}/chat/completions", json=body, timeout=PATIENCE)
    reply: dict[str, Any] = answer.raise_for_status().json()["choices"][0]["message"]
    return reply


def ask_once(session: ClientSession, row: Row) -> float:
    ask(session, str(row["prompt"]))
    return float(len(str(row["prompt"])))


def test_each_prompt_becomes_a_sequence_in_order(client: Client) -> None:
    fields = GatewayRollouts(client, ask_once, metadata={"run": "a"})(["a", "a", "bb", "bb"], trainer())
    assert fields["reward"] == [1, 1, 2, 2]
    sessions = [client.session(name) for name in fields["session_id"]]
    metadata = [item.info().metadata for item in sessions]
    groups = [entry.pop("group") for entry in metadata]
    assert metadata == [{"run": "a", "step": 7, "mode": "train", "prompt": number} for number in (0, 0, 1, 1)]
    # A group is a prompt's sessions of a step, also where another process has the same prompt under another number.
    assert groups[0] == groups[1] != groups[2] == groups[3]
    (elsewhere,) = GatewayRollouts(client, ask_once)(["bb"], trainer())["session_id"]
    assert client.session(elsewhere).info().metadata["group"] == groups[2]
    for n, session in enumerate(sessions):
        (path,) = session.trajectories()
        assert fields["prompt_ids"][n] + fields["completion_ids"][n] == path.token_ids.tolist()
        assert fields["completion_ids"][n] == path.token_ids[path.loss_mask].tolist()
        assert fields["logprobs"][n] == path.logprobs[path.loss_mask].tolist()


def test_prompts_with_images_are_grouped_by_their_pixels(client: Client) -> None:
    image = pytest.importorskip("PIL.Image")

    def prompt(shade: int) -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": image.new("L", (2, 2), shade)}, {"type": "text", "text": "What is it?"}]
        return [{"role": "user", "content": parts}]

    def agent(session: ClientSession, row: Row) -> float:
        ask(session, "What is it?")
        return float(row["prompt"][0]["content"][0]["image"].getpixel((0, 0)))

    fields = GatewayRollouts(client, agent)([prompt(1), prompt(1), prompt(2), prompt(2)], trainer())
    assert fields["reward"] == [1, 1, 2, 2]
    groups = [client.session(name).info().metadata["group"] for name in fields["session_id"]]
    assert groups[0] == groups[1] != groups[2] == groups[3]


def test_user_defined_group_is_kept(client: Client) -> None:
    fields = GatewayRollouts(client, ask_once, metadata={"group": "mine"})(["a"], trainer())
    assert client.session(fields["session_id"][0]).info().metadata["group"] == "mine"


def test_weights_are_synced_before_the_first_agent_runs(client: Client) -> None:
    seen: list[str] = []

    def agent(session: ClientSession, row: Row) -> float:
        seen.append("agent")
        return ask_once(session, row)

    GatewayRollouts(client, agent, sync=lambda state: seen.append(f"step {state.state.global_step}"))(["a"], trainer())
    assert seen == ["step 7", "agent"]


def test_evaluation_counts_its_generations_separately(client: Client) -> None:
    evaluating = trainer(model=SimpleNamespace(training=False))
    fields = GatewayRollouts(client, ask_once)(["a", "b"], evaluating)
    metadata = [client.session(name).info().metadata for name in fields["session_id"]]
    assert metadata[0].pop("group") != metadata[1].pop("group")
    assert metadata == [{"step": 7, "mode": "eval", "prompt": 0}, {"step": 7, "mode": "eval", "prompt": 1}]


def branching(session: ClientSession, row: Row) -> float:
    """Make a long branch, then a short one from the start."""
    reply = ask(session, "One?")
    ask(session, "Two?", {"role": "user", "content": "One?"}, reply)
    ask(session, "Something else?")
    return 1.0


def test_several_branches_are_refused_without_a_branch_choice(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"has 2 branches, but TRL takes one sequence per rollout.*branches="):
        GatewayRollouts(client, branching)(["a"], trainer())
    longest = GatewayRollouts(client, branching, branches="longest")(["a"], trainer())
    assert sum(longest["env_mask"][0]) == 8
    assert longest["branches"] == [2]
    last = GatewayRollouts(client, branching, branches="last")(["a"], trainer())
    assert sum(last["env_mask"][0]) == 4
    assert last["leaf"] == [2]


def test_branches_removed_by_select_do_not_count(client: Client) -> None:
    def impatient(session: ClientSession, row: Row) -> float:
        for _ in range(2):
            ask(session, "One?")
        return 1.0

    fields = GatewayRollouts(client, impatient, select=[DropRetries()])(["a"], trainer())
    assert fields["branches"] == [1]
    assert fields["leaf"] == [1]


def failing(session: ClientSession, row: Row) -> float:
    reward = ask_once(session, row)
    if row["prompt"] == "bad":
        raise RuntimeError("tool broke")
    return reward


def test_an_agent_that_fails_ends_the_batch_or_is_masked(client: Client) -> None:
    with pytest.raises(TokentapeError, match=r"agent raised RuntimeError.*failures='mask'"):
        GatewayRollouts(client, failing)(["good", "bad"], trainer())
    fields = GatewayRollouts(client, failing, failures="mask")(["good", "bad"], trainer())
    assert fields["reward"] == [4.0, None]
    assert [sum(mask) for mask in fields["env_mask"]] == [4, 0]
    # The tokens that it sampled until then are present and unchanged.
    (path,) = client.session(fields["session_id"][1]).trajectories()
    assert fields["completion_ids"][1] == path.token_ids[path.loss_mask].tolist()


def test_session_without_turns_borrows_ids_and_has_no_loss(client: Client) -> None:
    def agent(session: ClientSession, row: Row) -> float | None:
        return ask_once(session, row) if row["prompt"] == "good" else None

    fields = GatewayRollouts(client, agent, failures="mask")(["good", "bad"], trainer())
    assert fields["completion_ids"][1] == fields["completion_ids"][0]
    assert [sum(mask) for mask in fields["env_mask"]] == [4, 0]
    assert fields["reward"] == [4.0, None]
    with pytest.raises(TokentapeError, match="nothing was sampled"):
        GatewayRollouts(client, agent, failures="mask")(["bad"], trainer())


def test_temperature_absent_from_recorded_logprobs_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "engine", lambda: SimpleNamespace(engine="vllm 0.32.0 raw_logprobs generate"))
    message = r"temperature 1 only, but the trainer's temperature is 0\.7: .*processed_logprobs"
    with pytest.raises(InvalidRequest, match=message):
        GatewayRollouts(client, ask_once)(["a"], trainer(temperature=0.7))


def test_agents_that_sample_at_another_temperature_than_the_trainer_s_are_refused(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"sampled at temperature 1, but TRL divides logits by 0\.7"):
        GatewayRollouts(client, ask_once)(["a"], trainer(temperature=0.7))


def test_rewards_reported_by_the_agent_count(client: Client) -> None:
    async def agent(session: ClientSession, row: Row) -> None:
        ask_once(session, row)
        session.reward(0.25)

    assert GatewayRollouts(client, agent)(["a"], trainer())["reward"] == [0.25]


def test_reward_function_returns_recorded_rewards_and_logs_missing_ones() -> None:
    logged: dict[str, float] = {}
    rewards = recorded_reward([1.0, None], [3, 1], prompts=["a", "a"], log_metric=logged.__setitem__)
    assert rewards == [1.0, None]
    assert logged == {"rollouts/left_out": 1.0, "rollouts/without_reward": 0.5}


def test_correction_is_unchanged_with_vllm_and_refused_if_disabled() -> None:
    sampled_by_vllm = SimpleNamespace(
        use_vllm=True, vllm_importance_sampling_correction=True, vllm_generation="its own"
    )
    correct_by_recorded_logprobs(sampled_by_vllm)
    assert sampled_by_vllm.vllm_generation == "its own"
    with pytest.raises(InvalidRequest, match="vllm_importance_sampling_correction=False"):
        correct_by_recorded_logprobs(SimpleNamespace(use_vllm=False, vllm_importance_sampling_correction=False))


def test_rows_are_passed_in_prompts_without_changing_the_messages() -> None:
    from datasets import Dataset

    messages = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]] * 2
    rows = carry_rows(Dataset.from_dict({"prompt": messages, "answer": [3, 4], "tags": [["a"], []]}))
    assert [row_of(row["prompt"]) for row in rows] == [
        {"prompt": messages[0], "answer": 3, "tags": ["a"]},
        {"prompt": messages[0], "answer": 4, "tags": []},
    ]


def test_a_dataset_of_strings_or_without_prompts_gets_messages() -> None:
    from datasets import Dataset

    (row,) = carry_rows(Dataset.from_dict({"prompt": ["Hello"], "answer": [3]}))
    assert row_of(row["prompt"]) == {"prompt": [{"role": "user", "content": "Hello"}], "answer": 3}
    (row,) = carry_rows(Dataset.from_dict({"answer": [3]}))
    assert row_of(row["prompt"]) == {"prompt": [{"role": "user", "content": ""}], "answer": 3}
    assert row_of("as it is") == {"prompt": "as it is"}


def test_column_that_is_not_json_can_be_dropped() -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"answer": [3], "blob": [b"\x00"]})
    with pytest.raises(InvalidRequest, match=r"can't be written as JSON.*Pass `columns`"):
        carry_rows(rows)
    (row,) = carry_rows(rows, ["answer"])
    assert row_of(row["prompt"])["answer"] == 3


def test_masked_rollouts_keep_their_logprobs_finite(client: Client) -> None:
    fields = GatewayRollouts(client, failing, failures="mask")(["good", "bad"], trainer())
    assert all(np.isfinite(values).all() for values in fields["logprobs"])
