"""TRL environments, run through a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tokentape.chat._renderer import Renderer
from tokentape.client import Client, ClientSession
from tokentape.demo.tasks import SYSTEM_PROMPT, Task, calculate, sample_tasks
from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.training.trl import EnvironmentAgent
from tokentape.training.trl._environments import _with_observation

TASKS = [task for task in sample_tasks(3, 40) if len(task.questions) == 1 and task.questions[0].items]


class Shop:
    """An environment as written for TRL."""

    made: list[Shop]
    task: Task

    def __init__(self) -> None:
        self.looked_up: list[str] = []
        self.made.append(self)

    def reset(self, task: int, **row: Any) -> str:
        self.task = TASKS[task]
        return self.task.prompts[0]

    def lookup(self, item: str) -> str:
        """Price of an item.

        Args:
            item: Its name.

        """
        self.looked_up.append(item)
        return str(self.task.prices[item])

    async def calculator(self, expression: str) -> int:
        """Value of an expression.

        Args:
            expression: In whole numbers.

        """
        return calculate(expression)

    def get_reward(self) -> float:
        return float(bool(self.looked_up))

    def _not_a_tool(self) -> None: ...


@pytest.fixture
def session(gateway_url: str) -> Iterator[ClientSession]:
    Shop.made = []
    with Client(gateway_url) as client:
        yield client.session()


ROW = {"task": 0, "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": ""}]}
GREEDY = {"temperature": 0.0, "max_tokens": 160}


def run(agent: EnvironmentAgent, session: ClientSession, row: dict[str, Any]) -> float | None:
    return asyncio.run(agent(session, row))


def test_an_environment_s_tools_are_called_and_its_reward_returned(session: ClientSession) -> None:
    assert run(EnvironmentAgent(Shop, request=GREEDY), session, ROW) == 1.0
    (shop,) = Shop.made
    assert shop.looked_up == list(TASKS[0].questions[0].items)
    (path,) = session.trajectories()
    assert path.verdict == "exact, other logprobs"  # greedy
    assert len(path.turns) >= 2


def test_environment_is_chosen_by_a_row_field_that_it_does_not_receive(session: ClientSession) -> None:
    class Other(Shop):
        def reset(self, **row: Any) -> str:  # type: ignore[override]
            assert "environment" not in row
            return super().reset(**row)

    agent = EnvironmentAgent({"shop": Shop, "other": Other}, request=GREEDY)
    run(agent, session, {**ROW, "environment": "other"})
    assert [type(environment) for environment in Shop.made] == [Other]
    with pytest.raises(InvalidRequest, match="unknown environment 'none'; choose from other, shop"):
        run(agent, session, {**ROW, "environment": "none"})


def test_an_environment_without_reset_is_refused(session: ClientSession) -> None:
    with pytest.raises(InvalidRequest, match="dict has no method `reset`"):
        run(EnvironmentAgent(dict), session, ROW)


def test_no_more_calls_than_allowed(session: ClientSession) -> None:
    run(EnvironmentAgent(Shop, max_calls=1, request=GREEDY), session, ROW)
    assert len(session.info().turns) == 1


def test_tool_error_is_returned_to_the_model(session: ClientSession, renderer: Renderer) -> None:
    class Broken(Shop):
        def lookup(self, item: str) -> str:
            """Price of an item.

            Args:
                item: Its name.

            """
            raise RuntimeError("out of order")

    assert run(EnvironmentAgent(Broken, max_calls=2, request=GREEDY), session, ROW) == 0.0
    (path,) = session.trajectories()
    assert "out of order" in renderer.tokenizer.decode(path.token_ids.tolist())


def test_an_environment_without_tools_is_a_conversation(session: ClientSession) -> None:
    class Echo:
        def reset(self, prompt: list[dict[str, Any]]) -> None: ...

    assert run(EnvironmentAgent(Echo, request=GREEDY), session, {"prompt": [{"role": "user", "content": "Hi"}]}) is None
    assert len(session.info().turns) == 1


def test_refused_call_ends_the_agent_with_the_gateway_s_error(session: ClientSession) -> None:
    with pytest.raises(TokentapeError, match=r"refused a call, status 400: .*temperature"):
        run(EnvironmentAgent(Shop, request={"temperature": -1.0}), session, ROW)


@pytest.mark.parametrize(
    ("content", "observation", "expected"),
    [
        ("Ask: ", "price?", "Ask: price?"),
        ("Ask: ", None, "Ask: "),
        ("Ask: ", [{"type": "text", "text": "price?"}], [{"type": "text", "text": t} for t in ("Ask: ", "price?")]),
        ([{"type": "text", "text": "Ask: "}], "price?", [{"type": "text", "text": t} for t in ("Ask: ", "price?")]),
    ],
)
def test_observation_is_appended_to_the_last_message(content: Any, observation: Any, expected: Any) -> None:
    prompt = [{"role": "user", "content": content}]
    assert _with_observation(prompt, observation) == [{"role": "user", "content": expected}]
    assert prompt == [{"role": "user", "content": content}]
