"""Every filter and method ends within the time limit for repeated long texts and lists."""

from __future__ import annotations

import random
import time

import pytest

from tokentape.chat import _limits as limits
from tokentape.chat._sandbox import _METHODS, Sandbox
from tokentape.chat._template import ChatTemplate
from tokentape.errors import TemplateRefused, TokenizerUnusable

OWN = {"concat", "made", "step"}
TEXTS = (
    *("('a' * 3000000)", "('b' * 300000 ~ 'a')", "('ab' * 20000 ~ 'c' ~ 'ab' * 20000)", "('\\n' * 2000000)", "'a'"),
    *("(' a' * 1000000)", "('9' * 3000000)", "('<' * 2000000)", "('😀' * 1000000)", "(('<' * 200000) | safe)", "'\\t'"),
    *("'%99999d' * 10", "'{:99999}' * 10", "('\\x01' * 1000000)", "('a\\t' * 200000)", "('ΐ' * 1000000)"),
)
LISTS = (
    *("([1.5] * 100000)", "(['a' * 500] * 100000)", "([{'a': 'b'}] * 100000)", "([[1, [2]]] * 100000)"),
    *("range(99999)", "(('a' * 2000000) | batch(2) | list)", "[['a' * 3000000]]", "[]"),
)
DICTS = ("dict.fromkeys(range(99999), 'aaa')", "{'a': 'b' * 1000000}", "{97: 'b' * 1000}")
NUMBERS = ("1", "2", "99999", "-99999", "7 ** 20000", "1.5", "none", "true", "16", "'length'", "'a'", "'round'")
ARGUMENTS = (*TEXTS, *LISTS, *DICTS, *NUMBERS)
VALUES: dict[type, tuple[str, ...]] = {str: TEXTS, list: LISTS, dict: DICTS, int: ("7 ** 20000",), float: ("1.5",)}
VALUES[tuple] = ("range(99999)", "('a' * 1000000).partition('b')")
CALLS = [f"|{name}" for name in sorted(set(Sandbox().filters) - OWN)] + [
    f"{kind.__name__}.{name}" for kind, names in _METHODS.items() if kind in VALUES for name in sorted(names)
]


def expressions(call: str, count: int) -> list[str]:
    chosen = random.Random(call)
    kind, name = call.split("|" if call.startswith("|") else ".")
    values = next((some for method, some in VALUES.items() if method.__name__ == kind), ARGUMENTS)
    made = []
    for _ in range(count):
        arguments = ", ".join(chosen.choice(ARGUMENTS) for _ in range(chosen.choice((0, 1, 1, 2, 3))))
        value = chosen.choice(values)
        expression = f"({value}) | {name}({arguments})" if call.startswith("|") else f"({value}).{name}({arguments})"
        made.append(expression + chosen.choice(("", " | list")))
    return made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", CALLS)
def test_no_call_takes_longer_than_the_limit(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_SECONDS", 0.05)
    for expression in expressions(call, 30):
        start = time.thread_time()
        try:
            source = "{% for i in range(10000) %}{% set x = " + expression + " %}{% endfor %}"
            ChatTemplate(source)
        except (TemplateRefused, TokenizerUnusable):
            pass
        assert time.thread_time() - start < 1, expression
