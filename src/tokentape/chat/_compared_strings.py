"""Find the constants that a chat template compares with messages: words such as `/no_think`, names, and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jinja2 import nodes

_MOST = 32
"""The maximum number of constants that are tried. A template with more is probably built to cost time."""

_LONGEST = 200
HIGHEST = 64
"""The highest number of messages that is tried. A template that counts more is probably built to cost time."""
_LONGEST_TEXT = 2**16

_METHODS = ("startswith", "endswith", "find", "rfind", "index", "count", "split", "rsplit", "partition", "rpartition")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NOT_TEXT = ("role", "type", "name", "format", "arguments")
"""Keys in messages and schemas whose values are not callers' text."""


class Compared(NamedTuple):
    """The constants that a template compares with messages."""

    strings: tuple[str, ...]
    """Strings that it compares with texts or searches for in texts."""
    names: tuple[str, ...]
    """Names of tools and users."""
    number: int
    """The highest number that is not the length of a text, such as a message count; 0 if there is none."""
    length: int
    """The highest length of a text; 0 if there is none."""
    divisor: int
    """The highest number that it divides a count by, as for a reminder every fourth turn; 1 if there is none."""


NOTHING_COMPARED = Compared((), (), 0, 0, 1)


def compared(template: nodes.Template) -> Compared:
    """Return the constants in a template's comparisons, tests and searches."""
    assigned = _assigned(template)
    comparisons = [[node.expr, *(operand.expr for operand in node.ops)] for node in template.find_all(nodes.Compare)]
    named = [side for sides in comparisons if any(_field(side) == "name" for side in sides) for side in sides]
    strings = [text for text in _texts(_compared_with_text(template, comparisons), assigned) if text not in _ROLES]
    number, length = _numbers(template, assigned)
    return Compared(
        strings=tuple(strings[:_MOST]),
        names=tuple(_texts(named, assigned)[:_MOST]),
        number=number,
        length=length,
        divisor=_divisor(template, assigned),
    )


def _compared_with_text(template: nodes.Template, comparisons: Iterable[Sequence[nodes.Expr]]) -> Iterator[nodes.Node]:
    """Yield expressions that are compared with values that are no names, or passed to a method such as `find`.

    Arguments of macros count too. Comparisons of roles, types and names are skipped because they do not involve the
    text of messages.
    """
    for sides in comparisons:
        if not any(map(_holds_no_text, sides)):
            yield from sides
    macros = {macro.name for macro in template.find_all(nodes.Macro)}
    for call in template.find_all(nodes.Call):
        searches = isinstance(call.node, nodes.Getattr) and call.node.attr in _METHODS
        if searches or (isinstance(call.node, nodes.Name) and call.node.name in macros):
            yield from call.args
    for test in template.find_all(nodes.Test):
        if not _holds_no_text(test.node):
            yield from test.args or ()


def _texts(expressions: Iterable[nodes.Node], assigned: Mapping[str, nodes.Expr]) -> list[str]:
    """Return the strings among the expressions, and those that variables among them are set to or loop over."""
    texts = dict.fromkeys(text for node in expressions for text in _strings(node, assigned))
    return [text for text in texts if text.strip() and len(text) <= _LONGEST]


def _numbers(template: nodes.Template, assigned: Mapping[str, nodes.Expr]) -> tuple[int, int]:
    """Return the highest number in comparisons with anything else than a text's length, and in those with one.

    A number that is assigned to a variable is found if the variable is compared.
    """
    highest = {False: 0, True: 0}
    for compared in (*template.find_all(nodes.Compare), *template.find_all(nodes.Test)):
        named = [assigned.get(name.name) for name in compared.find_all(nodes.Name)]
        constants = [node for node in (*compared.find_all(nodes.Const), *named) if isinstance(node, nodes.Const)]
        lengths = [node for node in compared.find_all(nodes.Filter) if node.name in ("length", "count")]
        of_text = any(_field(node.node) in ("content", "text", "reasoning_content") for node in lengths)
        values = [node.value for node in constants if type(node.value) is int and node.value <= _LONGEST_TEXT]
        highest[of_text] = max([highest[of_text], *values])
    return highest[False], highest[True]


def _divisor(template: nodes.Template, assigned: Mapping[str, nodes.Expr]) -> int:
    """Return the highest number that a template divides a count by; 1 if there is none.

    Division by 2 is no matter: other histories have odd and even numbers of turns.
    """
    divisors = [mod.right for mod in template.find_all(nodes.Mod)]
    divisors += [(test.args or [test.node])[0] for test in template.find_all(nodes.Test) if test.name == "divisibleby"]
    named = [assigned.get(node.name, node) if isinstance(node, nodes.Name) else node for node in divisors]
    values = [node.value for node in named if isinstance(node, nodes.Const)]
    return max((value for value in values if type(value) is int and 2 < value <= HIGHEST), default=1)


def _assigned(template: nodes.Template) -> dict[str, nodes.Expr]:
    """Return the constants, and lists of them, that variables of a template are set to or loop over."""
    constant = nodes.Const | nodes.List | nodes.Tuple
    assigned: dict[str, nodes.Expr] = {}
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and isinstance(assignment.node, constant):
            assigned[assignment.target.name] = assignment.node
    for loop in template.find_all(nodes.For):
        listed = assigned.get(loop.iter.name, loop.iter) if isinstance(loop.iter, nodes.Name) else loop.iter
        if isinstance(loop.target, nodes.Name) and isinstance(listed, nodes.List | nodes.Tuple):
            assigned.setdefault(loop.target.name, listed)
    return assigned


def _strings(node: nodes.Node, assigned: Mapping[str, nodes.Expr]) -> Iterator[str]:
    if isinstance(node, nodes.Name):
        node = assigned.get(node.name, node)
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, nodes.List | nodes.Tuple):
        for item in node.items:
            yield from _strings(item, {})


def _holds_no_text(node: nodes.Node) -> bool:
    """Return whether the expression is a role, a type or a name: `message.role`, `message["role"]`."""
    return not isinstance(node, nodes.Name) and _field(node) in _NOT_TEXT


def _field(node: nodes.Node | None) -> object:
    """Return the field or variable that an expression reads: `role` for `message["role"] | lower`."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value
    return node.name if isinstance(node, nodes.Name) else None
