"""What decoding and retokenizing recorded sessions would have changed, and whether the record changed anything.

The first is what every pipeline does that stores messages and tokenizes them again for training: measured here on
completions one by one, and on whole trajectories rendered again from their messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from tokentape.chat.renderer import Renderer
from tokentape.chat.tokenizer import Tokenizer
from tokentape.engines.transformers import FinishedSample
from tokentape.errors import TemplateRefused
from tokentape.session.tree import Session
from tokentape.store import StoredSession
from tokentape.types import Message, Setup, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Change:
    """A stretch of text that was sampled as some ids and is retokenized to others."""

    session_id: str
    turn: int
    sampled: tuple[int, ...]
    retokenized: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """What decode-and-retokenize changes: out of `completions`, `tokens` and `trajectories`, those that differ."""

    completions: int
    changed_completions: int
    tokens: int
    """Sampled ones."""
    changed_tokens: int
    trajectories: int
    retokenized_trajectories: int
    """Those whose own text has other ids."""
    rerendered_trajectories: int
    """Those that have other ids after going through messages and template; templates rewrite history as well."""
    longest: Change | None
    """Of the changes that completions begin with, the one with the most sampled ids."""


def retokenization_drift(renderer: Renderer, sessions: Iterable[StoredSession]) -> Drift:
    """Retokenize every completion and re-render every branch of `sessions`, and compare with the ids recorded."""
    tokenizer = renderer.tokenizer
    counts: Counter[str] = Counter()
    changes: list[Change] = []
    for stored in sessions:
        for turn in stored.turns:
            sampled = turn.completion_ids.tolist()
            retokenized = _retokenized(tokenizer, sampled)
            counts["completions"] += 1
            counts["tokens"] += len(sampled)
            if sampled != retokenized:
                changes.append(Change(turn.session_id, turn.seq, *first_change(tokenizer, sampled, retokenized)))
                counts["changed_tokens"] += changed_tokens(tokenizer, sampled, retokenized)
        session = Session(stored.info, stored.turns)
        for leaf in session.leaves():
            path = session.path(leaf)
            ids = session.context_after(leaf).tolist()
            counts["trajectories"] += 1
            counts["retokenized"] += ids != _retokenized(tokenizer, ids)
            counts["rerendered"] += ids != _rerendered(renderer, path, stored.setups[path[-1].setup])
    return Drift(
        completions=counts["completions"],
        changed_completions=len(changes),
        tokens=counts["tokens"],
        changed_tokens=counts["changed_tokens"],
        trajectories=counts["trajectories"],
        retokenized_trajectories=counts["retokenized"],
        rerendered_trajectories=counts["rerendered"],
        longest=max(changes, key=lambda change: len(change.sampled), default=None),
    )


def changed_tokens(tokenizer: Tokenizer, sampled: Sequence[int], retokenized: Sequence[int]) -> int:
    """How many of the sampled tokens are not there, as the same id over the same bytes, after retokenization."""
    return len(_placed(tokenizer, sampled) - _placed(tokenizer, retokenized))


def first_change(
    tokenizer: Tokenizer, sampled: Sequence[int], retokenized: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first ids that differ, up to where both sides have spelled the same bytes again."""
    same = 0
    while same < min(len(sampled), len(retokenized)) and sampled[same] == retokenized[same]:
        same += 1
    ends = _ends(tokenizer, sampled[same:]), _ends(tokenizer, retokenized[same:])
    meeting = min(set(ends[0]) & set(ends[1]), default=None)
    if meeting is None:
        return tuple(sampled[same:]), tuple(retokenized[same:])
    left, right = (same + of_side.index(meeting) + 1 for of_side in ends)
    return tuple(sampled[same:left]), tuple(retokenized[same:right])


def turns_unlike_engine(trajectories: Iterable[Trajectory], log: Iterable[FinishedSample]) -> int:
    """How many recorded turns are not, bit for bit, a call in the engine's own log: prompt, sampled ids, logprobs.

    A turn's prompt is all of its trajectory before its first sampled token. So 0 also says that every context is the
    one before it + what was sampled there + the bridge.
    """
    calls = Counter(_key(call.prompt_ids, call.token_ids, call.logprobs) for call in log)
    recorded: dict[tuple[str, int], bytes] = {}
    for one in trajectories:
        for seq, start, end in zip(one.turns, one.completion_starts, one.completion_ends, strict=True):
            recorded[one.session_id, seq] = _key(
                one.token_ids[:start], one.token_ids[start:end], one.logprobs[start:end]
            )
    return (Counter(recorded.values()) - calls).total()


def _key(prompt_ids: Any, token_ids: Any, logprobs: Any) -> bytes:
    prompt = np.asarray(prompt_ids, np.int32)
    return b"".join(
        [
            len(prompt).to_bytes(8, "little"),
            prompt.tobytes(),
            np.asarray(token_ids, np.int32).tobytes(),
            np.asarray(logprobs, np.float32).tobytes(),
        ]
    )


def _retokenized(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    return tokenizer.encode_plain(tokenizer.decode(ids))


def _rerendered(renderer: Renderer, path: Sequence[Turn], setup: Setup) -> list[int] | None:
    """The branch as a stateless server would see it: the last prompt from messages, the last completion from text.

    None if the template refuses the messages.
    """
    *before, last = path
    messages = [message for turn in before for message in (*turn.messages, turn.reply)]
    messages += last.messages
    try:
        prompt = renderer.render([_with_objects(message) for message in messages], setup).ids
    except TemplateRefused:
        return None
    return [*prompt.tolist(), *_retokenized(renderer.tokenizer, last.completion_ids.tolist())]


def _with_objects(message: Message) -> Message:
    """The message with tool arguments as objects, which is how chat servers hand them to a template."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _placed(tokenizer: Tokenizer, ids: Sequence[int]) -> set[tuple[int, int]]:
    return set(zip(_ends(tokenizer, ids), ids, strict=True))


def _ends(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Per token the number of bytes up to its end."""
    sizes = [len(tokenizer.token_bytes(token_id)) for token_id in ids]
    return list(accumulate(sizes))
