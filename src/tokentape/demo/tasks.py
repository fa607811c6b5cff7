"""Seeded questions in a shop, and the tools to answer them. The demo's model was trained on them.

Every task has its own price list, so a model can't memorize answers; it has to look up prices and calculate.

    >>> task = sample_tasks(seed=0, n=1, split="heldout")[0]
    >>> agent_reply = f"The answer is {task.answer}."
    >>> is_solved(task, agent_reply)
    True
"""

from __future__ import annotations

import ast
import hashlib
import json
import operator
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

Split: TypeAlias = Literal["train", "heldout"]

SYSTEM_PROMPT = "You help in a shop."

_DATA = json.loads(Path(__file__).with_name("tasks.json").read_text(encoding="utf-8"))

TOOLS: list[dict[str, Any]] = _DATA["tools"]
"""The tools in the format of the OpenAI API."""

ITEMS, NAMES = tuple(_DATA["items"].split()), tuple(_DATA["names"].split())
GREETINGS = tuple(_DATA["greetings"])

_Form: TypeAlias = tuple[int, int, bool, str]
PHRASINGS: Mapping[_Form, tuple[str, ...]] = {tuple(form): tuple(texts) for *form, texts in _DATA["phrasings"]}
"""Phrasings by form: number of items, number of numbers, whether the previous answer is an operand, operator."""

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


@dataclass(frozen=True, slots=True)
class Question:
    """One user message, and the calculation that it asks for: the operands joined by the operator.

    The operands are the previous answer (if `continues`), the prices of `items`, and `numbers`, in this order. A
    greeting has a `name` and no operands.
    """

    prompt: str
    items: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    continues: bool = False
    operator: str = ""
    name: str = ""

    @property
    def subject(self) -> tuple[object, ...]:
        """What the question asks for, independent of phrasing and operand order; for a greeting, the text."""
        if self.name:
            return (self.prompt,)
        return sorted(self.items), sorted(self.numbers), self.continues, self.operator

    def operands(self, prices: Mapping[str, int], previous: int) -> tuple[int, ...]:
        """Return the operands, given the price list and the previous answer."""
        return (*((previous,) if self.continues else ()), *(prices[item] for item in self.items), *self.numbers)


@dataclass(frozen=True, slots=True)
class Task:
    """The questions of a session, and the shop's prices."""

    questions: tuple[Question, ...]
    prices: Mapping[str, int] = field(hash=False, repr=False)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The user messages in order. Each message is sent after the reply to the previous message."""
        return tuple(question.prompt for question in self.questions)

    @property
    def answers(self) -> tuple[str, ...]:
        """The text that each reply must contain: a number, or the user's name if the message is a greeting."""
        answers: list[str] = []
        value = 0
        for question in self.questions:
            operands = question.operands(self.prices, value)
            if operands:
                value = calculate(question.operator.join(map(str, operands)))
            answers.append(str(value) if operands else question.name)
        return tuple(answers)

    @property
    def answer(self) -> str:
        """The answer that the last reply must contain."""
        return self.answers[-1]


def calculate(expression: str) -> int:
    """Return the value of an integer expression with `+`, `-` and `*`. Raises ValueError for anything else.

    >>> calculate("12+37")
    49
    """
    # Limit the cost: the model may sample any expression.
    if len(expression) > 40:
        raise ValueError("expression too long")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError:
        raise ValueError("not an expression") from None
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("only whole numbers, +, - and * are understood")


def call_tool(task: Task, name: str, arguments: str) -> str:
    """Run a tool call as the model wrote it, and return the text of the tool message.

    Never raises: for a wrong call the text starts with `error`.

    >>> call_tool(Task((), {"pears": 12}), "lookup", '{"item": "pears"}')
    '12'
    """
    try:
        match name, json.loads(arguments):
            case "lookup", {"item": str(item)}:
                return str(task.prices[item]) if item in task.prices else "error: unknown item"
            case "calculator", {"expression": str(expression)}:
                return str(calculate(expression))
    except ValueError as error:
        return f"error: {error}"
    return "error: unknown tool or arguments"


def is_solved(task: Task, final_text: str) -> bool:
    """Return whether the last number in the last reply is the answer, or for a greeting, whether the name is in it.

    >>> is_solved(Task((Question("2+3?", numbers=(2, 3), operator="+"),), {}), "That makes 5.")
    True
    """
    pattern = r"(?<![\w-])-?\d+(?!\w)" if re.fullmatch(r"-?\d+", task.answer) else re.escape(task.answer)
    matches = re.findall(pattern, final_text)
    return bool(matches) and matches[-1] == task.answer


def sample_tasks(seed: int, n: int, split: Split = "train") -> list[Task]:
    """Draw `n` tasks. The same arguments give the same tasks.

    Train and heldout tasks are split by the hash of `Question.subject`, which all phrasings of a question share. So no
    question of a heldout task occurs in a train task, not even rephrased.
    """
    rng = random.Random(f"{split} {seed}")
    return [_sample_task(rng, split) for _ in range(n)]


def split_of(question: Question) -> Split:
    """Return the split of a question; one question in eight is held out."""
    digest = hashlib.sha256(repr(question.subject).encode()).digest()
    return "heldout" if digest[0] < 32 else "train"


def _sample_task(rng: random.Random, split: Split) -> Task:
    prices = {item: rng.randint(2, 99) for item in ITEMS}
    count = rng.choices((1, 2), weights=(5, 4))[0]
    questions: list[Question] = []
    value: int | None = None
    while len(questions) < count:
        question = _sample_question(rng, prices, value)
        if split_of(question) != split:
            continue
        questions.append(question)
        if operands := question.operands(prices, value or 0):
            value = calculate(question.operator.join(map(str, operands)))
    return Task(tuple(questions), prices)


def _sample_question(rng: random.Random, prices: Mapping[str, int], previous: int | None) -> Question:
    if rng.random() < 0.08:
        name = rng.choice(NAMES)
        return Question(rng.choice(GREETINGS).format(name=name), name=name)
    forms = [form for form in PHRASINGS if previous is not None or not form[2]]
    item_count, number_count, continues, op = form = rng.choice(forms)
    items = tuple(rng.sample(ITEMS, item_count))
    numbers = tuple(rng.randint(2, 12 if op == "*" else 99) for _ in range(number_count))
    question = Question("", items, numbers, continues, op)
    if op == "-":
        # Avoid negative answers: swap the operands if possible, otherwise subtract less.
        first, second = question.operands(prices, previous or 0)
        if first < second and item_count == 2:
            items = items[::-1]
        elif first < second:
            numbers = numbers[::-1] if number_count == 2 else (rng.randint(0, first),)
    words = dict(zip("xy", items, strict=False)) | dict(zip("mn" if number_count == 2 else "n", numbers, strict=False))
    return Question(rng.choice(PHRASINGS[form]).format(**words), items, numbers, continues, op)
