"""Find the constants that a chat template compares with messages: words such as `/no_think`, names, and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

_MOST = 64
"""The maximum number of constants that are tried. A template with more is probably built to cost time."""

_LONGEST = 200
HIGHEST = 64
"""The highest number of messages that is tried. A template that counts more is probably built to cost time."""
_LONGEST_TEXT = 2**16

_ROLES = ("system", "developer", "user", "assistant", "tool")
_NOT_TEXT = ("role", "type", "name", "format")
"""Keys in messages and schemas whose values are not callers' text."""
_NAMING = {"selectattr": 2, "rejectattr": 2, "map": 1, "select": 1, "reject": 1}
"""How many of a filter's first arguments name fields, tests or filters."""


class Compared(NamedTuple):
    """The constants that a template compares with messages."""

    strings: tuple[str, ...]
    """Strings that it may compare with texts or search for in texts."""
    names: tuple[str, ...]
    """Names of tools and users."""
    number: int
    """The highest number that is not the length of a text, such as a message count; 0 if there is none."""
    length: int
    """The highest length of a text; 0 if there is none."""
    divisor: int
    """The highest number that it divides a count by, as for a reminder every fourth turn; 1 if there is none."""
    keys: tuple[str, ...] = ()
    """Keys that it reads from the arguments of calls."""


NOTHING_COMPARED = Compared((), (), 0, 0, 1)


class Noting(NodeTransformer):
    """Adds a filter `noted` to what a template compares, looks for or passes to filters, unless it is a constant."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802 - the name is jinja2's
        self.generic_visit(node)
        node.expr = _noted(node.expr)
        for operand in node.ops:
            operand.expr = _noted(operand.expr)
        return node

    def visit_Call(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        node.args = [_noted(argument) for argument in node.args]
        return node

    visit_Filter = visit_Test = visit_Call  # noqa: N815


def _noted(node: nodes.Expr) -> nodes.Expr:
    return (
        node if isinstance(node, nodes.Const) else nodes.Filter(node, "noted", [], [], None, None, lineno=node.lineno)
    )


def compared(template: nodes.Template) -> Compared:
    """Return the constants in a template's comparisons, tests and searches."""
    assigned = _assigned(template)
    comparisons = [[node.expr, *(operand.expr for operand in node.ops)] for node in template.find_all(nodes.Compare)]
    named = [side for sides in comparisons if any(_field(side) == "name" for side in sides) for side in sides]
    names = dict.fromkeys(
        text for side in named for text in _strings(side, assigned) if text.strip() and len(text) <= _LONGEST
    )
    number, length = _numbers(template, assigned)
    return Compared(
        strings=tuple(_strings_read(template)[:_MOST]),
        names=tuple(names)[:_MOST],
        number=number,
        length=length,
        divisor=_divisor(template, assigned),
        keys=tuple(_keys(template))[:_MOST],
    )


def with_made(constants: Compared, made: Iterable[str]) -> Compared:
    """Return `constants` with the strings that the template has `made`."""
    return constants._replace(strings=tuple(dict.fromkeys([*constants.strings, *made]))[:_MOST])


def _keys(template: nodes.Template) -> dict[str, None]:
    """Return the keys that a template reads from `arguments`, or from a variable that it sets to them."""
    sets = [each for each in template.find_all(nodes.Assign) if _field(each.node) == "arguments"]
    arguments = {"arguments", *(each.target.name for each in sets if isinstance(each.target, nodes.Name))}
    items: list[nodes.Getattr | nodes.Getitem] = [*template.find_all(nodes.Getattr), *template.find_all(nodes.Getitem)]
    read = [_field(item) for item in items if _field(item.node) in arguments]
    for called in template.find_all(nodes.Call):
        if isinstance(called.node, nodes.Getattr) and _field(called.node.node) in arguments:
            read += [argument.value for argument in called.args[:1] if isinstance(argument, nodes.Const)]
    return dict.fromkeys(key for key in read if isinstance(key, str) and key not in dir(dict))


def _strings_read(template: nodes.Template) -> list[str]:
    """Return the strings of a template, except those that it only writes or that are no texts of messages.

    A template may compare any other with a text, also by way of variables, dicts, macros and filters. Names of fields
    that it reads, such as `content`, are left out too, unless it compares them, or puts them in a list or a call.
    """
    loaded = Counter(name.name for name in template.find_all(nodes.Name) if name.ctx == "load")
    written = [node for output in template.find_all(nodes.Output) for node in _written(output)]
    loaded.subtract(node.name for node in written if isinstance(node, nodes.Name))
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and loaded[assignment.target.name] <= 0:
            written += _written(nodes.Output([assignment.node]))
    skipped = {id(node) for node in (*written, *_no_texts(template))}
    fields = {_field(item) for item in template.find_all((nodes.Getattr, nodes.Getitem))}
    lists = (node.node for node in template.find_all(nodes.Assign) if isinstance(node.node, nodes.Literal))
    for used in (*template.find_all((nodes.Compare, nodes.Call, nodes.Test)), *lists):
        fields.difference_update(_strings_in(used, skipped))
    texts = dict.fromkeys(_strings_in(template, skipped))
    return [t for t in texts if is_text(t) and t not in fields]


def is_text(value: str) -> bool:
    """Return whether the string may be text of a message that a template looks for."""
    return bool(value.strip()) and len(value) <= _LONGEST and value not in _ROLES


def _written(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield the expressions in an output, or joined in one, of which the template writes the value."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Concat | nodes.Add):
            yield from _written(child)
        elif isinstance(child, nodes.CondExpr):
            yield from _written(nodes.Output([child.expr1, *filter(None, [child.expr2])]))
        else:
            yield child


def _no_texts(template: nodes.Template) -> Iterator[nodes.Node]:
    """Yield constants that are compared with roles, types or names, keys that are looked up, and errors."""
    for compared in template.find_all(nodes.Compare):
        sides = [compared.expr, *(operand.expr for operand in compared.ops)]
        if any(map(_holds_no_text, sides)):
            yield from sides
            yield from compared.find_all(nodes.Const)
    yield from (item.arg for item in template.find_all(nodes.Getitem))
    for applied in template.find_all(nodes.Filter):
        yield from applied.args[: _NAMING.get(applied.name, 0)]
    for called in template.find_all(nodes.Call):
        if isinstance(called.node, nodes.Name) and called.node.name == "raise_exception":
            yield from (*called.args, *called.find_all(nodes.Const))
        elif isinstance(called.node, nodes.Getattr) and called.node.attr == "get":
            yield from called.args[:1]


def _strings_in(node: nodes.Node, skipped: Set[int]) -> Iterator[str]:
    """Yield the strings in a node. Joined constants are one string; a constant joined with another value is none."""
    if isinstance(node, nodes.Const):
        yield from [node.value] if isinstance(node.value, str) and id(node) not in skipped else ()
        return
    children = list(node.iter_child_nodes())
    constants = [child.value for child in children if isinstance(child, nodes.Const) and isinstance(child.value, str)]
    joins = isinstance(node, nodes.Concat | nodes.Add)
    if joins and len(constants) == len(children):
        yield "".join(constants)
    for child in children:
        if not (joins and isinstance(child, nodes.Const)):
            yield from _strings_in(child, skipped)
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "split":
        for text in _strings_in(node.node, set()):
            yield from (piece for separator in constants or " " for piece in text.split(separator))


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

    Division by 2 is left out: the other histories have odd and even numbers of turns.
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
    """Yield the strings in a constant or a list, or in those that a variable is set to or loops over."""
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
