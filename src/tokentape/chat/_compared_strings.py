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

    A string that is assigned to a variable is found if the variable is compared. Comparisons of roles, types and names
    are skipped because they do not involve the text of messages.
    """
    assigned = {
        assignment.target.name: assignment.node
        for assignment in template.find_all(nodes.Assign)
        if isinstance(assignment.target, nodes.Name)
        and isinstance(assignment.node, nodes.Const | nodes.List | nodes.Tuple)
    }
    strings: dict[str, None] = {}
    for compare in template.find_all(nodes.Compare):
        sides = [compare.expr, *(operand.expr for operand in compare.ops)]
        if not any(map(_holds_no_text, sides)):
            strings |= dict.fromkeys(text for side in sides for text in _strings(side, assigned))
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _METHODS:
            strings |= dict.fromkeys(text for argument in call.args for text in _strings(argument, assigned))
    for test in template.find_all(nodes.Test):
        if not _holds_no_text(test.node):
            strings |= dict.fromkeys(text for argument in test.args or () for text in _strings(argument, assigned))
    return tuple(text for text in strings if text.strip() and len(text) <= _LONGEST and text not in _ROLES)[:_MOST]


def highest_compared(template: nodes.Template) -> int:
    """Return the highest number in a template's comparisons, such as a message count; 0 if no numbers are compared."""
    compares = template.find_all(nodes.Compare)
    values = [constant.value for compare in compares for constant in compare.find_all(nodes.Const)]
    return max((value for value in values if type(value) is int and value <= _HIGHEST), default=0)


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
