"""Find the constants that a chat template compares with messages: words such as `/no_think`, and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jinja2 import nodes

_MOST = 32
"""The maximum number of constants that are tried. A template with more is probably built to cost time."""

_LONGEST = 200
_HIGHEST = 64
"""The highest number that is tried. A template that counts more messages is probably built to cost time."""

_METHODS = ("startswith", "endswith", "find", "rfind", "index", "count", "split", "rsplit", "partition", "rpartition")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NOT_TEXT = ("role", "type", "name", "format", "arguments")
"""Keys in messages and schemas whose values are not callers' text."""


def compared_strings(template: nodes.Template) -> tuple[str, ...]:
    """Return the strings that a template compares with other values, or passes to a search method such as `find`.

    A string is also found if it is assigned to a variable, listed for a loop or passed to a macro. Comparisons of
    roles, types and names are skipped because they do not involve the text of messages.
    """
    assigned = _assigned(template)
    macros = {macro.name for macro in template.find_all(nodes.Macro)}
    strings: dict[str, None] = {}
    for compare in template.find_all(nodes.Compare):
        sides = [compare.expr, *(operand.expr for operand in compare.ops)]
        if not any(map(_holds_no_text, sides)):
            strings |= dict.fromkeys(text for side in sides for text in _strings(side, assigned))
    for call in template.find_all(nodes.Call):
        searches = isinstance(call.node, nodes.Getattr) and call.node.attr in _METHODS
        if searches or (isinstance(call.node, nodes.Name) and call.node.name in macros):
            strings |= dict.fromkeys(text for argument in call.args for text in _strings(argument, assigned))
    for test in template.find_all(nodes.Test):
        if not _holds_no_text(test.node):
            strings |= dict.fromkeys(text for argument in test.args or () for text in _strings(argument, assigned))
    return tuple(text for text in strings if text.strip() and len(text) <= _LONGEST and text not in _ROLES)[:_MOST]


def highest_compared(template: nodes.Template) -> int:
    """Return the highest number in a template's comparisons, such as a message count; 0 if no numbers are compared.

    A number that is assigned to a variable is found if the variable is compared.
    """
    assigned = _assigned(template)
    compared = (*template.find_all(nodes.Compare), *template.find_all(nodes.Test))
    values = [constant.value for node in compared for constant in node.find_all(nodes.Const)]
    named = [assigned.get(name.name) for node in compared for name in node.find_all(nodes.Name)]
    values += [node.value for node in named if isinstance(node, nodes.Const)]
    return max((value for value in values if type(value) is int and value <= _HIGHEST), default=0)


def divisor(template: nodes.Template) -> int:
    """Return the highest number that a template divides a count by, as for a reminder every fourth turn; 1 if none.

    Division by 2 is no matter: other histories have odd and even numbers of turns.
    """
    assigned = _assigned(template)
    divisors = [mod.right for mod in template.find_all(nodes.Mod)]
    divisors += [(test.args or [test.node])[0] for test in template.find_all(nodes.Test) if test.name == "divisibleby"]
    named = [assigned.get(node.name, node) if isinstance(node, nodes.Name) else node for node in divisors]
    values = [node.value for node in named if isinstance(node, nodes.Const)]
    return max((value for value in values if type(value) is int and 2 < value <= _HIGHEST), default=1)


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
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr in _NOT_TEXT
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value in _NOT_TEXT
