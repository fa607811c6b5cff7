"""Forced tool choices and strict tools: what the engine has to hold a reply to, if the gateway enforces them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tokentape.chat._call_constraint import CallRule
from tokentape.errors import UnsupportedParameter
from tokentape.gateway._endpoint import RequestContext


def forced_tools(choice: Any, tools: Sequence[str]) -> tuple[str, ...]:
    """Return the tools that a checked `tool_choice` of chat or Responses forces a call of; none if it forces none."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "required":
        return tuple(tools)
    # In chat the fields are one level deeper.
    inner = choice.get(kind, choice) if isinstance(choice, dict) else None
    if not isinstance(inner, dict):
        return ()
    named: Any = [inner] if kind == "function" else []
    if kind == "allowed_tools" and inner.get("mode") == "required":
        named = inner.get("tools")
    functions = [one.get("function", one) for one in named or () if isinstance(one, dict)]
    names = [one.get("name") for one in functions if isinstance(one, dict)]
    return tuple(name for name in tools if name in names)


def call_rule(
    context: RequestContext, choice: Any, forced: Sequence[str], strict: Collection[str], *, parallel: bool = True
) -> CallRule | None:
    """Return the rule for a reply's tool calls; None if there is none, or if the gateway only reports them.

    `choice` is the request's `tool_choice` if it is to have an effect, else None. `forced` are the tools of which it
    forces a call, and `strict` those that are strict. Raises `UnsupportedParameter` if the gateway enforces them and
    can't.
    """
    if not context.enforces_tools or (choice is None and not strict):
        return None
    if choice is not None and not forced:
        raise UnsupportedParameter(
            "tool_choice with this value can't be enforced; send only the tools that may be called", "tool_choice"
        )
    if "structural_tag" not in context.engine.sampling:
        raise UnsupportedParameter(
            f"the engine {context.engine.name!r} can't be held to tool calls; leave out strict and say in a message "
            "which tool to call, or use vLLM, SGLang, or the embedded engine with tokentape[grammar]",
            "tools" if choice is None else "tool_choice",
        )
    return CallRule(tuple(forced), frozenset(strict), parallel)
