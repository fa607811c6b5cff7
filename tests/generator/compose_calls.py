"""How composed templates write tool calls, and how results refer to them. All strings are Jinja."""

from __future__ import annotations

from collections.abc import Callable, Mapping

_ARGUMENTS = "(f.arguments if f.arguments is string else f.arguments | tojson)"
_VALUES = {
    "text_or_json": "(v if v is string else v | tojson)",
    "json": "(v | tojson)",
    "text_or_python": "(v | string)",
}
_TYPE = (
    "('string' if v is string else 'null' if v is none else 'boolean' if v is boolean else 'number' if v is number "
    "else 'json')"
)
_LABELS = {"id": "t.id", "index": "loop.index0", "running": "ns.calls"}

_EACH = (
    "{% for t in m.tool_calls %}{% set f = t.function %}{LABEL}{% if not loop.first %}{BETWEEN}{% endif %}{BODY}"
    "{% set ns.calls = ns.calls + 1 %}{% endfor %}"
)


def _items(body: str, between: str = "") -> str:
    joined = "{% if not loop.last %}" + between + "{% endif %}" if between else ""
    return "{% for k, v in f.arguments.items() %}" + body + joined + "{% endfor %}"


def _json(name: str, arguments: str, label: str) -> str:
    shown = '"id": {{ ns.label | tojson }}, ' if label else ""
    return "{" + f'"{name}": "{{{{ f.name }}}}", {shown}"{arguments}": ' + "{{ " + _ARGUMENTS + " }}}"


def calls(on: Mapping[str, str], header: Callable[[str], str], end: str) -> str:
    """The calls of `m`. `header` writes an assistant's header with more in it, `end` what ends a turn with calls."""
    style, value = on["calls"], _VALUES[on["values"]]
    label = _LABELS.get(on["call_label"], "")
    name = "{{ f.name }}" + ("{{ ':' ~ ns.label }}" if label else "")
    literal = "{{ v | tojson }}" if on["values"] != "text_or_python" else '{{ "\'" ~ v ~ "\'" if v is string else v }}'
    before = between = after = ""
    match style:
        case "hermes":
            body, between = (
                "<tool_call>{{ '\\n' }}" + _json("name", "arguments", label) + "{{ '\\n' }}</tool_call>",
                "{{ '\\n' }}",
            )
        case "tagged_parameters":
            parameter = "<parameter={{ k }}>{{ '\\n' ~ " + value + " ~ '\\n' }}</parameter>{{ '\\n' }}"
            function = f"<function={name}>{{{{ '\\n' }}}}{_items(parameter)}</function>"
            body = "<tool_call>{{ '\\n' }}" + function + "{{ '\\n' }}</tool_call>"
            between = "{{ '\\n' }}"
        case "key_value_tags":
            parameter = "<arg_key>{{ k }}</arg_key>{{ '\\n' }}<arg_value>{{ " + value + " }}</arg_value>{{ '\\n' }}"
            body = f"{{{{ '\\n' }}}}<tool_call>{name}{{{{ '\\n' }}}}{_items(parameter)}</tool_call>"
        case "python":
            body = f"{name}({_items('{{ k }}=' + literal, ', ')})"
            before, between, after = "<|python_start|>[", ", ", "]<|python_end|>"
        case "name_space_json" | "name_newline_json":
            space = " " if style == "name_space_json" else "{{ '\\n' }}"
            body = "[[call " + name + space + "{{ " + _ARGUMENTS + " }}]]"
        case "token_json":
            body = "<|call|>" + name + "<|args|>{{ " + _ARGUMENTS + " }}<|call_end|>"
        case "pipe_json":
            body = "<tool_call>" + name + "|{{ " + _ARGUMENTS + " }}</tool_call>"
        case "semicolons":
            body = f"<tool_call>{name}({_items('{{ k }}={{ ' + value + ' }}', '; ')})</tool_call>"
        case "bare_json":
            body, between = _json("name", "parameters", label), "{{ '\\n' }}"
        case "header_per_call":
            # The header of the turn is already written; each call also has its own header.
            body = header("' to=' ~ f.name") + "{{ " + _ARGUMENTS + " }}"
            between = end
        case "json_array":
            before, between, after = "[TOOL_CALLS][", ", ", "]"
            body = _json("name", "arguments", label)
        case "typed_tags":
            parameter = '<arg name="{{ k }}" type="{{ ' + _TYPE + ' }}">{{ ' + value + " }}</arg>"
            body = f'<call name="{name}">{_items(parameter)}</call>'
        case _:
            return ""
    labelled = "{% set ns.label = " + label + " ~ '' %}" if label else ""
    each = _EACH.replace("{LABEL}", labelled).replace("{BETWEEN}", between).replace("{BODY}", body)
    return before + each + after


def result_label(how: str) -> tuple[bool, str]:
    """Whether a result is labelled, and what sets `ns.label` before it."""
    lookup = (
        "{% set ns.label = '?' %}{% set ns.results = 0 %}{% for q in messages %}{% for t in q.tool_calls or [] %}"
        "{% if t.id == m.tool_call_idWHICH %}{% set ns.label = FOUND %}{% endif %}{% set ns.results = ns.results + 1 %}"
        "{% endfor %}{% endfor %}"
    )
    match how:
        case "name":
            return True, "{% set ns.label = m.name or 'tool' %}"
        case "name_by_id":
            return True, lookup.replace("FOUND", "t.function.name").replace("WHICH", "")
        case "id":
            return True, "{% set ns.label = m.tool_call_id or '' %}"
        case "number_by_id":
            first = lookup.replace("WHICH", " and ns.label == '?'")
            return True, first.replace("FOUND", "ns.results ~ ''")
        case "running":
            return True, "{% set ns.label = ns.results ~ '' %}{% set ns.results = ns.results + 1 %}"
        case _:
            return False, ""
