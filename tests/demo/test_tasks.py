"""The demo tasks: correct answers, disjoint splits, a checker that rejects wrong answers."""

import json

import pytest

from tokentape.demo.tasks import (
    TOOLS,
    Question,
    Task,
    calculate,
    call_tool,
    is_solved,
    sample_tasks,
    split_of,
)

PRICES = {"pears": 12, "plums": 30}
PAIR = Question("", items=("pears", "plums"), operator="+")
THEN_TIMES = Question("", numbers=(2,), continues=True, operator="*")
GREETING = Question("", name="Ada")


def test_sampling_depends_on_its_arguments_only() -> None:
    assert sample_tasks(3, 20, "train") == sample_tasks(3, 20, "train")
    assert sample_tasks(3, 20, "train") != sample_tasks(4, 20, "train")
    assert sample_tasks(3, 20, "train") != sample_tasks(3, 20, "heldout")


def test_splits_share_no_question() -> None:
    train = {repr(q.subject) for task in sample_tasks(0, 1000, "train") for q in task.questions}
    heldout = {repr(q.subject) for task in sample_tasks(0, 1000, "heldout") for q in task.questions}
    assert train
    assert heldout
    assert not train & heldout


def test_split_ignores_phrasing_and_order() -> None:
    for first in range(2, 40):
        question = Question("What is it?", numbers=(first, 50), operator="+")
        other = Question("Add them.", numbers=(50, first), operator="+")
        assert split_of(question) == split_of(other)


def test_both_splits_have_every_question_kind() -> None:
    def kinds(split: str) -> set[tuple[int, int, bool, str, bool]]:
        return {
            (len(q.items), len(q.numbers), q.continues, q.operator, bool(q.name))
            for task in sample_tasks(0, 800, split)  # type: ignore[arg-type]
            for q in task.questions
        }

    assert kinds("train") == kinds("heldout")
    assert len(kinds("train")) == 13


def test_no_sampled_answer_is_negative() -> None:
    answers = [answer for task in sample_tasks(1, 2000, "train") for answer in task.answers]
    assert not [answer for answer in answers if answer.startswith("-")]


def test_answers_follow_the_conversation() -> None:
    assert Task((PAIR, GREETING, THEN_TIMES), PRICES).answers == ("42", "Ada", "84")


@pytest.mark.parametrize(
    ("expression", "value"), [("12+37", 49), ("2 * -3", -6), ("7-10", -3), ("2+3*4", 14), ("(2+3)*4", 20)]
)
def test_calculate_evaluates_expressions(expression: str, value: int) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", ["", "1/2", "2**9", "True+1", "1.5+1", "abs(1)", "x", "1+", "9" * 41, "'a'*9"])
def test_calculate_refuses_everything_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"expression|only whole numbers"):
        calculate(expression)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("lookup", '{"item": "pears"}', "12"),
        ("lookup", '{"item": "cars"}', "error: unknown item"),
        ("calculator", '{"expression": "12+37"}', "49"),
        ("calculator", '{"expression": "1/2"}', "error: only whole numbers, +, - and * are understood"),
        ("calculator", '{"item": "pears"}', "error: unknown tool or arguments"),
        ("lookup", '{"item": 3}', "error: unknown tool or arguments"),
        ("search", '{"item": "pears"}', "error: unknown tool or arguments"),
    ],
)
def test_call_tool(name: str, arguments: str, result: str) -> None:
    assert call_tool(Task((), PRICES), name, arguments) == result


@pytest.mark.parametrize("arguments", ["", "{", '{"item"', "[1]", "null", '"pears"'])
def test_call_tool_answers_broken_arguments_with_an_error(arguments: str) -> None:
    assert call_tool(Task((), PRICES), "lookup", arguments).startswith("error: ")


@pytest.mark.parametrize(
    ("text", "solved"),
    [
        ("The answer is 42.", True),
        ("12+30 makes 42", True),
        ("42 is 12 and 30", False),
        ("The answer is 142.", False),
        ("The answer is -42.", False),
        ("The answer is 4 2.", False),
        ("", False),
    ],
)
def test_is_solved_uses_the_last_number(text: str, solved: bool) -> None:
    assert is_solved(Task((PAIR,), PRICES), text) is solved


def test_is_solved_looks_for_the_name_after_a_greeting() -> None:
    task = Task((PAIR, GREETING), PRICES)
    assert is_solved(task, "Hello Ada! How can I help?")
    assert not is_solved(task, "Hello Anna! How can I help?")


def test_schemas_name_the_tools_that_exist() -> None:
    arguments = {"lookup": {"item": "pears"}, "calculator": {"expression": "1+1"}}
    for tool in TOOLS:
        name = tool["function"]["name"]
        assert tool["function"]["parameters"]["required"] == list(arguments[name])
        assert not call_tool(Task((), PRICES), name, json.dumps(arguments[name])).startswith("error")
