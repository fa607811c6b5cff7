"""Read conversations from files of other projects into OpenAI messages.

Files are parsed as data: Python sources are read with `ast`, and only assignments and classes of literals are used
from the modules of Miles and verl. Nothing is imported from them.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("TOKENTAPE_EXTERNAL", Path(__file__).parents[3] / "shared" / "external"))
MANIFEST = json.loads((Path(__file__).parent / "manifest.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation of a suite."""

    name: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]


def missing() -> list[str]:
    """Return the names of the manifest's files that the folder lacks."""
    return [entry["file"] for entry in MANIFEST["files"] if not (FOLDER / entry["file"]).is_file()]


def changed() -> list[str]:
    """Return the names of files with other contents than the manifest lists."""
    there = [entry for entry in MANIFEST["files"] if entry["sha256"] and (FOLDER / entry["file"]).is_file()]
    return [
        entry["file"]
        for entry in there
        if hashlib.sha256((FOLDER / entry["file"]).read_bytes()).hexdigest() != entry["sha256"]
    ]


def miles() -> Iterator[Conversation]:
    """Yield the trajectories of Miles."""
    scope: dict[str, Any] = {}
    for node in _parsed("miles_mock_trajectories.py").body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Trajectory"):
            fields = _assigned(node.body, scope)
            if "MESSAGES" in fields:
                name = node.name.removesuffix("Trajectory")
                yield Conversation(name, fields["MESSAGES"], fields["TOOLS"] or ())
        else:
            scope |= _assigned([node], scope)


def verl() -> Iterator[Conversation]:
    """Yield the text trajectories of verl. Those with images are built by code and can't be read as data."""
    tree = _parsed("verl_chat_template_mock_trajectories.py")
    tools = _verl_tools(tree)
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if ast.unparse(node.value.func) not in ("SingleTurnTrajectory", "ToolAgentTrajectory"):
            continue
        fields = {keyword.arg: keyword.value for keyword in node.value.keywords}
        messages = list(_evaluated(fields["raw_prompt"], {}))
        if "assistant_response" in fields:
            messages.append({"role": "assistant", "content": _evaluated(fields["assistant_response"], {})})
        for step in getattr(fields.get("steps"), "elts", ()):
            parts = {keyword.arg: keyword.value for keyword in step.keywords}
            messages.append(_evaluated(parts["assistant"], {}))
            messages += _evaluated(parts["appended_messages"], {}) if "appended_messages" in parts else ()
        name = _evaluated(fields["name"], {})
        yield Conversation(name, messages, tools if "tools" in fields else ())


def _verl_tools(tree: ast.Module) -> list[dict[str, Any]]:
    tools = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_schema":
            try:
                arguments = [_evaluated(arg, {}) for arg in node.args]
                arguments += [_evaluated(keyword.value, {}) for keyword in node.keywords]
            except ValueError:
                continue  # a schema with a value from the enclosing function: for images
            name, description, properties, required = arguments
            parameters = {"type": "object", "properties": properties, "required": required}
            function = {"name": name, "description": description, "parameters": parameters}
            tools.append({"type": "function", "function": function})
    return tools


def tau() -> Iterator[Conversation]:
    """Yield the 200 recorded airline trajectories of tau-bench."""
    tools = [_returned(path, "get_info") for path in sorted((FOLDER / "tau_tools").glob("*.py"))]
    for at, load in enumerate(json.loads((FOLDER / "tau_gpt-4o-airline.json").read_bytes())):
        yield Conversation(f"{at}", load["traj"], tools)


def bfcl(name: str) -> Iterator[Conversation]:
    """Yield the questions of a BFCL file, each answered by the calls that BFCL expects.

    BFCL has no tool results, so a made-up text answers each call, and a short made-up answer follows the last call of a
    user's turn.
    """
    answers = {entry["id"]: entry["ground_truth"] for entry in _lines(f"bfcl/possible_answer/BFCL_v4_{name}.json")}
    for entry in _lines(f"bfcl/BFCL_v4_{name}.json"):
        if name.startswith("multi_turn"):
            functions = _functions(entry["involved_classes"])
            turns = [[[_spelled_call(text, functions)] for text in turn] for turn in answers[entry["id"]]]
        else:
            functions = entry["function"]
            turns = [[[_expected_call(call) for call in answers[entry["id"]]]]]
        messages = list(_messages(entry["question"], turns))
        tools = [{"type": "function", "function": {k: f[k] for k in _SHOWN if k in f}} for f in functions]
        yield Conversation(entry["id"], messages, tools)


def bfcl_all() -> Iterator[Conversation]:
    """Yield all of them, file by file."""
    for name in BFCL:
        yield from bfcl(name)


_SHOWN = ("name", "description", "parameters")
BFCL = ("multi_turn_base", "parallel", "parallel_multiple", "live_parallel")
EVERY = 120
"""One in this many of the recorded histories is replayed on every template."""

_Call = tuple[str, dict[str, Any]]


def _messages(questions: Sequence[Any], turns: Sequence[Sequence[Sequence[_Call]]]) -> Iterator[dict[str, Any]]:
    made = 0
    for question, steps in zip(questions, turns, strict=True):
        yield from question
        for calls in steps:
            ids = [f"call{made + n:05d}" for n in range(len(calls))]
            made += len(calls)
            tool_calls = [
                {"id": i, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for i, (name, arguments) in zip(ids, calls, strict=True)
            ]
            yield {"role": "assistant", "content": None, "tool_calls": tool_calls}
            for i, (name, _) in zip(ids, calls, strict=True):
                yield {"role": "tool", "name": name, "tool_call_id": i, "content": f'{{"done": "{i}"}}'}
        yield {"role": "assistant", "content": f"That is done, after {made} calls."}
    yield {"role": "user", "content": "Thank you."}


def _expected_call(call: Mapping[str, Mapping[str, Sequence[Any]]]) -> _Call:
    """Return the first correct value for each argument; "" marks an optional argument."""
    [(name, arguments)] = call.items()
    return name, {key: values[0] for key, values in arguments.items() if values and values[0] != ""}


def _spelled_call(text: str, functions: Sequence[Mapping[str, Any]]) -> _Call:
    node = ast.parse(text, mode="eval").body
    assert isinstance(node, ast.Call)
    name = ast.unparse(node.func)
    declared = next(f for f in functions if f["name"] == name)
    names = list(declared["parameters"]["properties"])
    arguments = {names[n]: ast.literal_eval(arg) for n, arg in enumerate(node.args)}
    arguments |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return name, arguments


_CLASSES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}


def _functions(classes: Sequence[str]) -> list[dict[str, Any]]:
    return [entry for name in classes for entry in _lines(f"bfcl/multi_turn_func_doc/{_CLASSES[name]}.json")]


def _lines(file: str) -> Iterator[dict[str, Any]]:
    for line in (FOLDER / file).read_text(encoding="utf-8").splitlines():
        if line.strip():
            yield json.loads(line)


def constants(file: str) -> dict[str, Any]:
    """Return the assignments of literals in a Python file."""
    return _assigned(_parsed(file).body, {})


def _parsed(file: str) -> ast.Module:
    return ast.parse((FOLDER / file).read_text(encoding="utf-8"))


def _assigned(body: Sequence[ast.stmt], scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the assignments in `body` of literals and of names in `scope`."""
    constants: dict[str, Any] = {}
    for node in body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and node.value is not None:
            try:
                constants[target.id] = _evaluated(node.value, {**scope, **constants})
            except ValueError:
                continue
    return constants


def _returned(path: Path, function: str) -> Any:
    """Return the literal that a function of a file returns."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            [value] = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return)]
            assert value is not None
            return _evaluated(value, {})
    raise LookupError(f"{path.name} has no {function}")


def _evaluated(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    """Return the value of literals, of names in `scope`, of sums, and of verl's three helpers for messages."""
    match node:
        case ast.Name(id=name) if name in scope:
            return scope[name]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluated(left, scope) + _evaluated(right, scope)
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_evaluated(item, scope) for item in elements]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {_evaluated(key, scope): _evaluated(value, scope) for key, value in pairs if key is not None}
        case ast.Call(func=ast.Name(id="_assistant"), args=args):
            content, *calls = (_evaluated(arg, scope) for arg in args)
            return {"role": "assistant", "content": content} | ({"tool_calls": calls[0]} if calls else {})
        case ast.Call(func=ast.Name(id="_tool_call"), args=args):
            call_id, name, arguments = (_evaluated(arg, scope) for arg in args)
            return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        case ast.Call(func=ast.Name(id="_tool_message"), args=args):
            call_id, name, payload = (_evaluated(arg, scope) for arg in args)
            content = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
            return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}
        case ast.Call(func=ast.Name(id="frozenset"), args=[arg]):
            return frozenset(_evaluated(arg, scope))
    return ast.literal_eval(node)


REPLAYED = {"miles": (miles, 1), "verl": (verl, 1), "bfcl": (bfcl_all, EVERY), "tau-bench": (tau, EVERY)}
"""By suite: the reader of its conversations, and N, where one in N conversations is replayed."""
