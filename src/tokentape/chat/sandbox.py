"""The sandbox that chat templates run in: no way to Python's insides, and no end of time or memory.

Templates are code (CVE-2024-34359, CVE-2026-5760). Jinja's sandbox keeps them from attributes and from changing what
they are given; here they are also kept from running for ever and from making huge strings, each time they render.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.sandbox
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

MOST_STEPS = 200_000
"""Turns of loops and calls of macros in one rendering: about a second, and far more than conversations take."""

MOST_CHARACTERS = 2**26
"""Length of any string that an expression makes."""

MOST_ITEMS = 2**20
"""Length of any list that an expression makes."""

MOST_NUMBER = 100_000
"""Largest width, count or precision that may be asked of a filter or a method."""

STEPS = "_steps_left"
"""The name under which a rendering is given its `Steps`."""

_SIZED_FILTERS = ("batch", "center", "format", "indent", "round", "slice", "truncate", "wordwrap")
_OF_DICTS = frozenset(dir(dict))
_OF_STRINGS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
_OF_LOOPS = frozenset({"first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0"})
_VALUES = frozenset({str, int, bool, float, list, dict, type(None)})
_COUNT = jinja2.nodes.EnvironmentAttribute("count")
"""What is called for a step, in the templates as they are parsed."""

_LONG_NUMBER = re.compile(r"\d{6}")


class Steps:
    """Counts the steps of one rendering."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MOST_STEPS

    def __call__(self) -> None:
        """Count one more. Raises `jinja2.TemplateError` when it is too many."""
        self._left -= 1
        if self._left < 0:
            raise jinja2.TemplateError(f"it runs for more than {MOST_STEPS} steps")


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's environment with limits. A template made by it is rendered with a `Steps` under the name `STEPS`."""

    intercepted_binops = frozenset({"*", "+", "%", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters.update({name: _bounded(self.filters[name]) for name in _SIZED_FILTERS})

    class code_generator_class(jinja2.compiler.CodeGenerator):  # noqa: N801 - the attribute is jinja2's
        """Has strings joined by the environment, which looks at their length."""

        def visit_Call(  # noqa: N802
            self, node: jinja2.nodes.Call, frame: jinja2.compiler.Frame, forward_caller: bool = False
        ) -> None:
            """Write a step as the short call that it is, anything else as a call that the environment looks at."""
            if node.node == _COUNT:
                self.write(f"context.parent[{STEPS!r}]()")
            else:
                super().visit_Call(node, frame, forward_caller=forward_caller)

        def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
            """Write a call of `Sandbox.join`."""
            self.write("environment.join((")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write("))")

    def getattr(self, obj: Any, attribute: str) -> Any:
        """What a dot does. Most stand between a message and its key, where there is nothing to guard."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in _OF_STRINGS) or (kind is LoopContext and attribute in _OF_LOOPS):
            return getattr(obj, attribute)
        if kind is Namespace and not attribute.startswith("_"):
            value = getattr(obj, attribute, None)
            if type(value) in _VALUES:
                return value
        return super().getattr(obj, attribute)

    def join(self, parts: tuple[Any, ...]) -> str:
        """What `~` does."""
        texts = [part if type(part) is str else str(part) for part in parts]
        _refuse_long("", sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """What an operator does, unless what it makes is too large."""
        if operator == "+" and type(left) is str and type(right) is str:
            return self.join((left, right))
        if operator == "*":
            for several, count in ((left, right), (right, left)):
                if isinstance(several, str | list | tuple) and isinstance(count, int):
                    _refuse_long(several, len(several) * count)
        elif operator == "**":
            _refuse_large((left, right))
        elif operator == "%" and isinstance(left, str):
            _refuse_wide(left)
        elif isinstance(left, str | list) and isinstance(right, str | list):
            _refuse_long(left, len(left) + len(right))
        return self.binop_table[operator](left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja2 has it
        """What a call does, unless a string's method is asked for something huge."""
        if isinstance(getattr(__obj, "__self__", None), str):
            _refuse_large((*args, *kwargs.values()))
            if type(__obj) is BuiltinMethodType and __obj.__name__ in _OF_STRINGS:
                kwargs.pop("_block_vars", None)
                kwargs.pop("_loop_vars", None)
                return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's safe form of `str.format`, unless it asks for something huge."""
        formatting = super().wrap_str_format(value)
        if formatting is not None:
            _refuse_wide(value.__self__)
        return formatting

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        for kind in (jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock):
            for node in template.find_all(kind):
                assert isinstance(node, jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock)
                step = jinja2.nodes.Call(_COUNT, [], [], None, None)
                node.body.insert(0, jinja2.nodes.ExprStmt(step).set_lineno(node.lineno))
        return template


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _refuse_large((*args[1:], *kwargs.values()))
        if function.__name__ == "do_format":
            _refuse_wide(str(args[0]))
        return function(*args, **kwargs)

    return bounded


def _refuse_long(kind: object, length: int) -> None:
    most = MOST_CHARACTERS if isinstance(kind, str) else MOST_ITEMS
    if length > most:
        raise jinja2.TemplateError(f"it makes a value longer than {most}")


def _refuse_large(numbers: tuple[Any, ...]) -> None:
    for number in numbers:
        if isinstance(number, int) and abs(number) > MOST_NUMBER:
            raise jinja2.TemplateError(f"it asks for a width or count above {MOST_NUMBER}")


def _refuse_wide(text: str) -> None:
    if _LONG_NUMBER.search(text):
        raise jinja2.TemplateError("it formats with a width of six digits or more")
