"""Run chat templates without access to Python's internals and with limited time and memory.

Templates are code (CVE-2024-34359, CVE-2026-5760). Jinja's sandbox blocks unsafe attributes and changes to arguments.
This sandbox also stops templates that run forever or create huge values. Each loop, call and operator checks the time
and counts its result (`_limits.py`). Operations that multiply sizes or take more than linear time check sizes first.
Filters and tests are in `_template_filters.py`. Features that no chat template uses are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from tokentape.chat._limits import GROWTH, MOST_OTHER_KEYS, usage
from tokentape.chat._template_filters import (
    limited_filters,
    limited_tests,
    printf,
    refuse_others,
    refuse_wide_times,
    replaced,
    string_arguments,
)

_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(name for name in dir(str) if not name.startswith("_")) - {"encode", "maketrans", "translate"},
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "grouper", "index", "list"}),
    int: frozenset({"bit_length"}),
    float: frozenset({"is_integer"}),
    LoopContext: frozenset(name for name in dir(LoopContext) if not name.startswith("_")),
}
"""The attributes of built-in types and loops that templates may use. No expression creates bytes or sets."""

_OF_DICTS = frozenset(dir(dict))


class _Namespace(Namespace):
    def __init__(*args: Any, **kwargs: Any) -> None:  # as in jinja2: a template may use the keyword `self`
        Namespace.__init__(args[0], *map(usage().counted, args[1:]), **kwargs)

    def __repr__(self) -> str:
        # A namespace may contain any amount, and unlike other values it can change after it was weighed.
        raise jinja2.TemplateError("it writes a namespace as text")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's environment with fewer attributes."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute` for a template. Dict keys, the usual case, need no check."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind in (str, LoopContext) and attribute in _METHODS[kind] and not attribute.startswith("format"):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return `obj[argument]` after checking the time, because filters look up a path in each item of a list."""
        usage().tick()
        return super().getitem(obj, argument)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use the attribute. For built-in types, only those in `_METHODS` are allowed."""
        if type(obj) is _Namespace:
            # The template itself set the namespace's attributes.
            return not attr.startswith("_")
        names = next((_METHODS[kind] for kind in type(obj).__mro__ if kind in _METHODS), None)
        return super().is_safe_attribute(obj, attr, value) if names is None else attr in names


class Sandbox(_Environment):
    """Jinja's environment with limits. Compile with `compiled`; render within `limits.limited`."""

    intercepted_binops = frozenset({"*", "+", "-", "/", "//", "%", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalize, **options)
        counting: dict[str, Any] = {"made": _made, "step": _step, "concat": _concat}
        self.filters = limited_filters(_Environment()) | counting
        self.tests = limited_tests(self.tests)
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace

    @staticmethod
    def concat(pieces: Any) -> str:
        """Join the parts of a rendering or of a block in it."""
        return usage().concat(pieces)

    def compiled(self, source: str, change: NodeTransformer | None = None) -> jinja2.Template:
        """Compile a template after `change` has changed its tree. Raises `jinja2.TemplateSyntaxError`."""
        tree = self.parse(source)
        if change is not None:
            change.visit(tree)
        for escaping in tree.find_all(nodes.ScopedEvalContextModifier):
            if all(isinstance(option.value, nodes.Const) and not option.value.value for option in escaping.options):
                continue
            raise jinja2.TemplateSyntaxError("chat templates don't write HTML: remove autoescape", escaping.lineno)
        return self.from_string(_Counting().visit(tree).set_environment(self))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of an operator, or refuse the operation if the result would be too large."""
        use = usage()
        if type(left) is int and type(right) is int:
            if operator == "**":
                use.bits(left.bit_length() * abs(right))
            return use.made(self.binop_table[operator](left, right))
        if operator == "%" and isinstance(left, str):
            return printf(left, right)
        if operator == "+":
            if type(left) is list and type(right) is list:
                return use.appended(left, right)
            if type(left) is not str or type(right) is not str:
                use.fits(GROWTH * (use.weigh(left) + use.weigh(right)))  # `Markup` escapes what is added to it.
        elif operator == "*":
            for several, count in ((left, right), (right, left)):
                if isinstance(count, int) and not isinstance(several, int | float):
                    use.room(use.weigh(several) * count)
        elif not isinstance(left, int | float) or not isinstance(right, int | float):
            refuse_others(operator, left, right)
        return use.made(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja2 has it
        """Return the result of a call, or refuse the call if its arguments would make the result huge."""
        scope = {name: kwargs.pop(name) for name in ("_loop_vars", "_block_vars") if name in kwargs}
        """The variables in scope. Jinja passes them with each call in a loop or block, for `Context.call`."""
        usage().tick()
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `format`.
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = string_arguments(owner, method.__name__, args, kwargs)
            if method.__name__ == "replace" and not kwargs:
                return usage().made(replaced(owner, *args))
        elif getattr(method, "__name__", "") == "strftime":
            refuse_wide_times("".join(map(str, args)))
        result = super().call(__context, __obj, *args, **kwargs, **scope)
        if isinstance(owner, str) and isinstance(result, list | tuple):
            result = type(result)(usage().counted(result))
        return usage().made(result)


class _Counting(NodeTransformer):
    """Adds counting filters where Jinja calls no environment method: literals, slices, comparisons and loops."""

    def visit_Concat(self, node: nodes.Concat) -> Any:  # noqa: N802
        values = nodes.List([self.visit(part) for part in node.nodes], lineno=node.lineno)
        return nodes.Filter(values, "concat", [], [], None, None, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> Any:  # noqa: N802
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        looks_in = node.ops[0].op in ("in", "notin") and not _is_constant(node.ops[0].expr)
        compares_values = sum(not _is_constant(operand) for operand in operands) > 1
        return _filtered(node, "step") if looks_in or compares_values else node

    def visit_Getitem(self, node: nodes.Getitem) -> Any:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "made") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> Any:  # noqa: N802
        if isinstance(node, nodes.Dict) and sum(not _is_text(item.key) for item in node.items) > MOST_OTHER_KEYS:
            raise jinja2.TemplateSyntaxError(f"a dict has more than {MOST_OTHER_KEYS} non-string keys", node.lineno)
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _filtered(node, "made")

    visit_Tuple = visit_Dict = visit_List  # noqa: N815

    def visit_For(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> Any:  # noqa: N802
        self.generic_visit(node)
        step = nodes.Filter(nodes.Const(None), "step", [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.Filter(node.test, "step", [], [], None, None, lineno=node.lineno)
        return node

    visit_Macro = visit_CallBlock = visit_Block = visit_For  # noqa: N815


def _is_text(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


def _filtered(node: Any, name: str) -> Any:
    return node if _is_constant(node) else nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _is_constant(node: nodes.Expr) -> bool:
    """Return whether the node is a constant, whose size is limited by the template's length."""
    if isinstance(node, nodes.Tuple | nodes.List):
        return all(map(_is_constant, node.items))
    return isinstance(node, nodes.Const)


def _finalize(value: Any) -> str:
    """Return an expression's value as the text to write into a rendering."""
    return value if type(value) is str else usage().text(value)


# `pass_context` keeps Jinja from evaluating these filters when it compiles a template.


@pass_context
def _made(context: Context, value: Any) -> Any:
    return usage().made(value)


@pass_context
def _step(context: Context, value: Any) -> Any:
    usage().tick()
    return value


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    return usage().concat(values)
