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
_KEEPING = ("string", "trim", "replace")
_CALLERS = {"messages", "tools", "documents", "loop", "self", "caller", "varargs", "kwargs", "namespace"}
"""Variables that may contain callers' text."""


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
    """Adds a filter `noted` to what a template compares, looks for or passes on, unless it is a constant or written."""

    def visit_Template(self, node: nodes.Template) -> nodes.Template:  # noqa: N802 - the name is jinja2's
        self._written = {id(each) for each in _only_written(node)}
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = self._noted(node.expr)
        for operand in node.ops:
            operand.expr = self._noted(operand.expr)
        return node

    def visit_Call(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        node.args = [self._noted(argument) for argument in node.args]
        return node

    visit_Filter = visit_Test = visit_Call  # noqa: N815

    def _noted(self, node: nodes.Expr) -> nodes.Expr:
        constant = {type(node), *map(type, node.iter_child_nodes())} <= {nodes.Const, nodes.List, nodes.Tuple}
        left = constant or id(node) in self._written
        return node if left else nodes.Filter(node, "noted", [], [], None, None, lineno=node.lineno)


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
    skipped = {id(node) for node in (*_only_written(template), *_no_texts(template))}
    fields = {_field(item) for item in template.find_all((nodes.Getattr, nodes.Getitem))}
    lists = (node.node for node in template.find_all(nodes.Assign) if isinstance(node.node, nodes.Literal))
    for used in (*template.find_all((nodes.Compare, nodes.Call, nodes.Test)), *lists):
        fields.difference_update(_strings_in(used, skipped))
    texts = dict.fromkeys(_strings_in(template, skipped))
    return [t for t in texts if is_text(t) and t not in fields]


def is_text(value: str) -> bool:
    """Return whether the string may be text of a message that a template looks for."""
    return bool(value.strip()) and len(value) <= _LONGEST and value not in _ROLES


def _only_written(template: nodes.Template) -> list[nodes.Node]:
    """Return the expressions of which a template only writes the value, also by way of variables and macros."""
    macros, names = list(template.find_all(nodes.Macro)), list(template.find_all(nodes.Name))
    variables = {id(name): name.name for name in names}
    for macro in macros:  # A macro within another comes after it.
        own = {parameter.name for parameter in macro.args}
        variables |= {id(n): f"{macro.name} {n.name}" for n in macro.find_all(nodes.Name) if n.name in own}
    set_names = Counter(["caller", "loop", *(m.name for m in macros), *(n.name for n in names if n.ctx != "load")])
    called = {macro.name: macro for macro in macros if set_names[macro.name] == 1}

    def parts(node: nodes.Node) -> Iterator[nodes.Node]:
        inner: list[nodes.Node] = []
        if isinstance(node, nodes.Output | nodes.Concat | nodes.Add | nodes.CondExpr | nodes.List | nodes.Tuple):
            inner += node.iter_child_nodes(exclude=["test"])
        elif isinstance(node, nodes.Getitem) or (isinstance(node, nodes.Filter) and node.name in _KEEPING):
            if {*map(type, node.iter_child_nodes(exclude=["node"]))} <= {nodes.Const}:
                inner += node.iter_child_nodes(only=["node"])
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name in called:
            given = zip(called[node.node.name].args, node.args, strict=False)
            inner += [node.node, *(value for parameter, value in given if variables[id(parameter)] in written)]
        yield from (node, *(each for part in inner for each in parts(part)))

    # Nothing else reads these variables. Among them are parameters, and names of macros (for what these return).
    flows, written = list(_flows(template, "")), {"", *variables.values()}
    for _ in range(_MOST):
        found: list[nodes.Node] = []
        for target, value in flows:
            if (target if isinstance(target, str) else variables[id(target)]) in written:
                found += parts(value)
            elif isinstance(value, nodes.Output):  # `Noting` finds what macros and blocks return.
                found += (node for node in value.nodes if isinstance(node, nodes.Const))
        known = {id(node) for node in found}
        read = {variables[id(name)] for name in names if name.ctx == "load" and id(name) not in known}
        if written.isdisjoint(read):
            return found
        written -= read
    return []


def _flows(node: nodes.Node, returned: str) -> Iterator[tuple[nodes.Name | str, nodes.Node]]:
    """Yield (variable, expression) for what is set, looped over or written. What is written goes to `returned`."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Assign | nodes.For) and isinstance(child.target, nodes.Name):
            if not any(read.attr in ("previtem", "nextitem") for read in child.find_all(nodes.Getattr)):
                yield child.target, child.node if isinstance(child, nodes.Assign) else child.iter
        elif isinstance(child, nodes.Output):
            yield returned, child
        block = isinstance(child, nodes.AssignBlock | nodes.FilterBlock | nodes.CallBlock | nodes.Block)
        yield from _flows(child, child.name if isinstance(child, nodes.Macro) else "?" if block else returned)


def _with_callers_text(template: nodes.Template) -> set[str]:
    """Return the variables that may contain callers' text, unlike template kwargs and what is made of them."""
    flows = {id(to): (to, nodes.Output([value])) for to, value in _flows(template, "") if isinstance(to, nodes.Name)}
    others = (name for name in template.find_all(nodes.Name) if name.ctx != "load" and id(name) not in flows)
    found = _CALLERS.union((name.name for name in others), (macro.name for macro in template.find_all(nodes.Macro)))
    read = [(to.name, {name.name for name in value.find_all(nodes.Name)}) for to, value in flows.values()]
    for _ in range(_MOST):
        before, found = found, found.union(to for to, values in read if not found.isdisjoint(values))
        if found == before:
            return found
    return {name.name for name in template.find_all(nodes.Name)}


def _no_texts(template: nodes.Template) -> Iterator[nodes.Node]:
    """Yield constants compared with roles, types, names or template kwargs, keys that are looked up, and errors."""
    callers = _with_callers_text(template)
    for compared in template.find_all(nodes.Compare):
        sides = [compared.expr, *(operand.expr for operand in compared.ops)]
        if any(map(_holds_no_text, sides)) or not any(n.name in callers for n in compared.find_all(nodes.Name)):
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
