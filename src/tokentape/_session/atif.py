"""Convert branches to ATIF 1.7 documents, Harbor's trajectory format, with messages as steps and their token ids.

A turn's reply is an agent step with prompt ids, sampled ids and logprobs in its `metrics`. A tool's result is an
observation in the step that called the tool. Steps from turns that an earlier document contains are marked
`is_copied_context`, which in ATIF means that they must not be trained again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from tokentape._session.matching import reasoning_of
from tokentape._session.tree import Session
from tokentape.errors import InvalidRequest
from tokentape.types import Message, Setup, Trajectory, Turn

_SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}


def atif_document(
    session: Session, setups: Mapping[str, Setup], branch: Trajectory, earlier: Collection[int] = ()
) -> dict[str, Any]:
    """Return a branch's document. Its `trajectory_id` is SESSION/LEAF.

    `earlier` are the turns that earlier documents of the session contain. The agent's `name` and `version` come from
    the session's metadata, `agent` and `agent_version`. Reward, verdict and metadata are in `extra`. Raises
    `InvalidRequest` if the branch has images, because ATIF expects images as files.
    """
    if branch.media:
        raise InvalidRequest(f"session {branch.session_id!r} has images, which ATIF export does not support", "format")
    path, metadata = session.path(branch.leaf), branch.metadata
    steps: list[dict[str, Any]] = []
    for turn, start in zip(path, branch.completion_starts.tolist(), strict=True):
        before = len(steps)
        for message in turn.messages:
            _add(steps, message)
        steps.append(
            {"source": "agent", **_message_fields(turn.reply), **_sampled(turn, branch.token_ids[:start].tolist())}
        )
        if turn.seq in earlier:
            for step in steps[before:]:
                step["is_copied_context"] = True
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": branch.session_id,
        "trajectory_id": f"{branch.session_id}/{branch.leaf}",
        "agent": {
            "name": str(metadata.get("agent", "unknown")),
            "version": str(metadata.get("agent_version", "unknown")),
            "tool_definitions": list(setups[path[-1].setup].tools),
        },
        "steps": [{"step_id": n, **step} for n, step in enumerate(steps, 1)],
        "final_metrics": {
            "total_prompt_tokens": sum(entry["prompt_tokens"] for entry in metrics),
            "total_completion_tokens": sum(entry["completion_tokens"] for entry in metrics),
            "total_steps": len(steps),
        },
        "extra": {"reward": branch.reward, "verdict": branch.verdict, "metadata": dict(metadata)},
    }


def _add(steps: list[dict[str, Any]], message: Message) -> None:
    """Append a request's message: a tool's result to the step that called the tool, any other message as a step."""
    if message["role"] != "tool":
        # ATIF allows reasoning and tool calls only in agent steps.
        fields = _message_fields(message) if message["role"] == "assistant" else {"message": _text(message)}
        steps.append({"source": _SOURCES.get(message["role"], "user"), **fields})
        return
    call_id = message.get("tool_call_id")
    calling_steps = [step for step in steps if call_id in [call["tool_call_id"] for call in step.get("tool_calls", ())]]
    if not calling_steps:
        call_id, calling_steps = None, steps
        if not steps:
            steps.append({"source": "system", "message": ""})
    results = calling_steps[-1].setdefault("observation", {"results": []})["results"]
    results.append({"source_call_id": call_id, "content": _text(message)})


def _message_fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"message": _text(message)}
    if reasoning := reasoning_of(message):
        fields["reasoning_content"] = reasoning
    if calls := list(_calls(message)):
        fields["tool_calls"] = calls
    return fields


def _calls(message: Message) -> Iterator[dict[str, Any]]:
    for n, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        raw = function.get("arguments") or {}
        fields = {"tool_call_id": call.get("id") or f"call_{n}", "function_name": function["name"]}
        try:
            arguments = json.loads(raw) if isinstance(raw, str) else raw
            json.dumps(arguments, allow_nan=False)
        except (ValueError, RecursionError):
            # Also NaN, Infinity and 1e999, which Python reads as JSON but other readers do not.
            arguments = None
        if isinstance(arguments, dict):
            yield {**fields, "arguments": arguments}
        else:
            yield {**fields, "arguments": {}, "extra": {"arguments": raw}}


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _sampled(turn: Turn, prompt_ids: list[int]) -> dict[str, Any]:
    return {
        "timestamp": datetime.fromtimestamp(turn.created_at, UTC).isoformat(),
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(turn.completion_ids),
            "prompt_token_ids": prompt_ids,
            "completion_token_ids": turn.completion_ids.tolist(),
            "logprobs": turn.logprobs.astype(np.float64).tolist(),
            "extra": {
                "turn": turn.seq,
                "finish_reason": turn.finish_reason,
                "engine": turn.engine,
                "weight_version": turn.weight_version,
                "weight_changes": turn.weight_changes,
            },
        },
    }
