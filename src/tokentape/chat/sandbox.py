"""The sandbox that chat templates run in: no way to Python's insides, and no end of time or memory.

Templates are code (CVE-2024-34359, CVE-2026-5760). Jinja's sandbox keeps them from attributes and from changing what
they are given; here they are also kept from running for ever and from making huge values. Each rendering has a budget
(`budget.py`): the code that jinja2 makes of a template counts turns and calls, and hands to the budget what operators,
filters, tests, methods and outputs (`operations.py`) look through and make.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.nodes
import jinja2.sandbox
from jinja2.runtime import LoopContext, Macro
from jinja2.utils import Namespace

from tokentape.chat import operations
from tokentape.chat.budget import Budget, join_output
from tokentape.chat.operations import BUDGET, METHODS

OF_A_CALL = 192
"""Characters that count for the object that a call may make."""

NODES_OF_A_STEP = 512
"""A turn of a loop whose body has more parts than that counts as several steps."""

_OF_DICTS = frozenset(dir(dict))
_OF_STRINGS = METHODS[str] - {"format", "format_map"}
_OF_LOOPS = frozenset({"first", "index", "index0", "last", "length", "nextitem", "previtem", "revindex", "revindex0"})
_ABSENT = object()

_VALUES = frozenset({str, int, bool, float, list, dict, type(None)})
_COUNT = jinja2.nodes.EnvironmentAttribute("count")
"""What is called for a step, in the templates as they are parsed."""


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Writes calls of the rendering's `Budget` around what can cost time or memory."""

    def write_commons(self) -> None:
        """Begin a function with its budget."""
        super().write_commons()
        self.writeline(f"budget = context.parent[{BUDGET!r}]")
        self.writeline("concat = budget.concat")

    def visit_Call(  # noqa: N802
        self, node: jinja2.nodes.Call, frame: jinja2.compiler.Frame, forward_caller: bool = False
    ) -> None:
        """Write a step as the short call that it is, anything else as a call that the environment looks at."""
        if node.node == _COUNT:
            self.write("budget")
            self._in_call(node.args, frame)
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        """Write `~`."""
        self.write("budget.concat(")
        self._in_call(node.nodes, frame)
        self.write(")")

    def visit_Add(self, node: jinja2.nodes.BinExpr, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        """Write `+`."""
        self.write("budget.add")
        self._in_call([node.left, node.right], frame)

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        """Write a comparison, as it is if it is with a constant."""
        first, *others = node.ops
        if others:
            self._write_chain(node, frame)
        elif first.op in ("in", "notin"):
            if _is_constant(node.expr) and _is_constant(first.expr):
                super().visit_Compare(node, frame)
                return
            self.write("(not " if first.op == "notin" else "(")
            self.write("budget.find")
            self._in_call([node.expr, first.expr], frame)
            self.write(")")
        elif _is_constant(node.expr) or _is_constant(first.expr):
            super().visit_Compare(node, frame)
        else:
            self.write(f"budget.compare({first.op!r}, ")
            self.visit(node.expr, frame)
            self.write(", ")
            self.visit(first.expr, frame)
            self.write(")")

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        """Write `a[b]`, where `b` is hashed, and `a[b:c]`, which makes a value."""
        if isinstance(node.arg, jinja2.nodes.Slice):
            self.write("budget.made(")
            super().visit_Getitem(node, frame)
            self.write(")")
        elif _is_constant(node.arg):
            super().visit_Getitem(node, frame)
        else:
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(", budget.seen")
            self._in_call([node.arg], frame)
            self.write(")")

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        """Write `{a: b}`, where `a` is hashed."""
        self.write("budget.made({")
        for pair in node.items:
            self.write("" if _is_constant(pair.key) else "budget.seen(")
            self.visit(pair.key, frame)
            self.write(": " if _is_constant(pair.key) else "): ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("})")

    def visit_List(self, node: jinja2.nodes.List, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        """Write `[a, b]`."""
        self.write("budget.made(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        """Write `a, b`, which may stand on the left of an assignment too."""
        self.write("budget.made(" if node.ctx == "load" else "")
        super().visit_Tuple(node, frame)
        self.write(")" if node.ctx == "load" else "")

    def _output_child_pre(
        self,
        node: jinja2.nodes.Expr,
        frame: jinja2.compiler.Frame,
        finalize: Any,
    ) -> None:
        """Have an expression written as text: by nobody if it is text."""
        self.write("(piece if type(piece := (")

    def _output_child_post(
        self,
        node: jinja2.nodes.Expr,
        frame: jinja2.compiler.Frame,
        finalize: Any,
    ) -> None:
        self.write(")) is str else budget.text(piece))")

    def _in_call(self, values: list[jinja2.nodes.Expr], frame: jinja2.compiler.Frame) -> None:
        self.write("(")
        for value in values:
            self.visit(value, frame)
            self.write(", ")
        self.write(")")

    def _write_chain(self, node: jinja2.nodes.Compare, frame: jinja2.compiler.Frame) -> None:
        self.write("(budget.seen")
        self._in_call([node.expr], frame)
        for operand in node.ops:
            self.write(f" {jinja2.compiler.operators[operand.op]} budget.seen")
            self._in_call([operand.expr], frame)
        self.write(")")


def _is_constant(node: jinja2.nodes.Expr) -> bool:
    """Whether it is as long as it is in the source."""
    if isinstance(node, jinja2.nodes.Tuple | jinja2.nodes.List):
        return all(map(_is_constant, node.items))
    return isinstance(node, jinja2.nodes.Const)


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's environment with limits. A template made by it is rendered with a `Budget` under the name `BUDGET`."""

    intercepted_binops = frozenset({"*", "+", "-", "/", "//", "%", "**"})
    code_generator_class = _CodeGenerator
    concat = staticmethod(join_output)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters.update(operations.filters(self.filters))
        self.tests.update(operations.tests(self.tests))
        for name in operations.UNUSED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]

    def getattr(self, obj: Any, attribute: str) -> Any:
        """What a dot does. Most stand between a message and its key, where there is nothing to guard."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in _OF_STRINGS) or (kind is LoopContext and attribute in _OF_LOOPS):
            return getattr(obj, attribute)
        if kind is Namespace and not attribute.startswith("_"):
            value = getattr(obj, attribute, _ABSENT)
            if type(value) in _VALUES:
                return value
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a dot may give this: of Python's own kinds only what templates have a use for."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        return next((attr in names for kind, names in METHODS.items() if isinstance(obj, kind)), True)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """What an operator other than `+` does, unless what it makes is too large."""
        if operator == "-" and type(left) is int and type(right) is int:
            return left - right
        return operations.binary(context.parent[BUDGET], operator, self.binop_table[operator], left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja2 has it
        """What a call does, unless it is asked for something huge."""
        budget: Budget = __context.parent[BUDGET]
        if type(__obj) is BuiltinMethodType or isinstance(getattr(__obj, "__self__", None), str):
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return operations.method(budget, __obj, args, kwargs)
        budget.make(OF_A_CALL + 8 * (len(args) + len(kwargs)))
        if type(__obj) is not Macro:
            operations.pay_for_call(budget, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's safe form of `str.format`, unless it asks for something huge."""
        formatting = super().wrap_str_format(value)
        return None if formatting is None else operations.str_format(value.__self__, formatting)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        for escaping in template.find_all(jinja2.nodes.ScopedEvalContextModifier):
            raise jinja2.TemplateSyntaxError("chat templates write no HTML: no autoescape", escaping.lineno)
        for kind in (jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock, jinja2.nodes.Block):
            for node in list(template.find_all(kind)):
                assert isinstance(
                    node, jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock | jinja2.nodes.Block
                )
                node.body.insert(0, jinja2.nodes.ExprStmt(_step(node.body)).set_lineno(node.lineno))
                if isinstance(node, jinja2.nodes.For) and node.test is not None:
                    # Also for what the loop leaves out. A step is no value, so that it does not decide.
                    node.test = jinja2.nodes.Or(_step([node.test]), node.test)
        return template


def _step(body: list[jinja2.nodes.Node]) -> jinja2.nodes.Call:
    nodes = sum(1 for part in body for _ in part.find_all(jinja2.nodes.Node))
    steps = [jinja2.nodes.Const(1 + nodes // NODES_OF_A_STEP)] if nodes >= NODES_OF_A_STEP else []
    return jinja2.nodes.Call(_COUNT, steps, [], None, None)
