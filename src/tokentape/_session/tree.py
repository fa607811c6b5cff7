"""One session in memory: an append-only tree of turns, and where a request continues it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from tokentape._session.matching import call_ids, chained, history_keys, message_key, reasoning_of, renamed_calls
from tokentape.types import Event, Message, SessionInfo, TokenIds, Turn

UNREAD = "unread"
"""Kind of the events that say whether a turn's client left before it had the whole reply. Body: `{"unread": true}`."""

NO_IDS: TokenIds = np.empty(0, dtype=np.int32)
"""The context of a turn that has no parent."""


@dataclass(frozen=True, slots=True)
class ContinuationPoint:
    """The turn that a request continues, and the messages that are new."""

    parent: Turn | None
    """The deepest turn with a history that begins the request; None if the request is rendered from the start."""
    new_messages: tuple[Message, ...]
    """The request's messages after the parent's history."""
    context_ids: TokenIds
    """The parent's context and completion; empty without a parent."""
    key: bytes = b""
    """The key of the request's whole history; see `history_keys`."""
    system: bool = False
    """Whether the parent's history has a system or developer message."""


class SharedMessages(tuple[Message, ...]):
    """The first messages of several sessions. They are compressed for the store only once."""

    compressed: bytes | None = None


class LazyMessages(Sequence[Message]):
    """The messages of a request, parsed by `read` on first access.

    `tail` holds the last messages, parsed. `key` is the history key (see `history_keys`) of the messages before them,
    under the setup with the digest `setup`.
    """

    def __init__(
        self, read: Callable[[], Sequence[Message]], tail: Sequence[Message] = (), key: bytes = b"", setup: str = ""
    ) -> None:
        self.tail = tail
        self.key = key
        self.setup = setup
        self._read = read
        self._messages: tuple[Message, ...] | None = None

    def _all(self) -> tuple[Message, ...]:
        if self._messages is None:
            self._messages = tuple(self._read())
        return self._messages

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Message, ...]: ...
    def __getitem__(self, index: int | slice) -> Message | tuple[Message, ...]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())


class Session:
    """The tree of a session's turns. Only `add` changes it, and it only appends."""

    def __init__(self, info: SessionInfo, turns: Iterable[Turn] = (), events: Iterable[Event] = ()) -> None:
        self.info = info
        self.unread = unread_turns(events)
        """`seq` of the turns that are marked as not read to their end by any client; see `leaves`."""
        self.turns: list[Turn] = []
        self._history: list[bytes] = []
        """For each turn, the key of its whole message history, reply included."""
        self._system: list[bool] = []
        """For each turn, whether its history has a system or developer message."""
        self._by_history: dict[bytes, int] = {}
        self._by_reply: dict[bytes, int] = {}
        self._same_history: dict[int, int] = {}
        """Links a turn to an earlier one with the same history key. Replies that differ only in reasoning share one."""
        self._same_reply: dict[int, int] = {}
        self._children: dict[int | None, list[int]] = {}
        self._answered: set[tuple[int | None, str, bytes | None]] = set()
        """(parent, setup, key of the new messages) of every turn. A request with the same three is a sibling."""
        self._numbered_history: list[bytes] = []
        """Like `_history`, with the position of each tool call in place of its id; filled by `_number_turns`."""
        self._by_numbered: dict[bytes, list[int]] = {}
        self._by_numbered_reply: dict[bytes, list[int]] = {}
        self._call_ids: set[Any] = set()
        """Ids of all tool calls in the replies of the turns in `_numbered_history`."""
        self._last_context: tuple[int, TokenIds] | None = None
        self._request_keys: list[bytes] = []
        """The history keys of the requests of the turns that are not in `_history` yet, as far as they are known."""
        for turn in turns:
            self.add(turn)

    def add(self, turn: Turn, request_key: bytes = b"") -> None:
        """Append a committed turn. `request_key` is the history key of its request, if the caller knows it.

        Raises ValueError unless the turn's `seq` is the next one and its parent is in the tree.
        """
        if turn.seq != len(self.turns) or (turn.parent is not None and turn.parent >= turn.seq):
            raise ValueError(f"turn {turn.seq} (parent {turn.parent}) can't follow {len(self.turns)} turns")
        self.turns.append(turn)
        self._request_keys.append(request_key)
        if turn.finish_reason != "abort":
            self._children.setdefault(turn.parent, []).append(turn.seq)

    def _index_turns(self) -> None:
        """Index the turns added since the last call by the keys of their messages. Reading a record needs no keys."""
        for turn, request_key in zip(self.turns[len(self._history) :], self._request_keys, strict=True):
            start = None if turn.parent is None else self._history[turn.parent]
            reply = message_key(turn.reply)
            answered = request_key or [start, *history_keys(turn.setup, turn.messages, start)][-1]
            (key,) = chained(turn.setup, [reply], answered)
            self._history.append(key)
            spoken = any(message.get("role") in ("system", "developer") for message in turn.messages)
            self._system.append(spoken or (turn.parent is not None and self._system[turn.parent]))
            if turn.finish_reason != "abort":
                if key in self._by_history:
                    self._same_history[turn.seq] = self._by_history[key]
                if reply in self._by_reply:
                    self._same_reply[turn.seq] = self._by_reply[reply]
                self._by_history[key] = self._by_reply[reply] = turn.seq
                self._answered.add((turn.parent, turn.setup, answered))
        self._request_keys.clear()

    def continuation(self, messages: Sequence[Message], setup: str) -> ContinuationPoint:
        """Find the deepest turn under the same setup with a history that is a prefix of `messages`.

        If several turns have the same history, prefer the one with the reasoning that was sent back, then the newest.
        """
        self._index_turns()
        if isinstance(messages, LazyMessages) and messages.setup == setup:
            point = self._after(messages.tail, history_keys(setup, messages.tail, messages.key), None)
            if point is not None:
                return point
        keys = history_keys(setup, messages)
        point = self._after(messages, keys, lambda end: [reasoning_of(message) for message in messages[:end]])
        return point or ContinuationPoint(None, tuple(messages), NO_IDS, keys[-1] if keys else b"")

    def _after(
        self, messages: Sequence[Message], keys: Sequence[bytes], reasoning: Callable[[int], list[str]] | None
    ) -> ContinuationPoint | None:
        """Return the deepest turn with one of `keys`, which has the history key after each of `messages`.

        `reasoning(n)` returns the reasoning of the request's first n messages. Return None if no turn matches, or if
        several have the same history and `reasoning` is None.
        """
        for end in range(len(keys), 0, -1):
            newest = self._by_history.get(keys[end - 1])
            if newest is not None:
                seq = newest
                if newest in self._same_history:
                    if reasoning is None:
                        return None
                    sent_reasoning, same = reasoning(end), _linked(newest, self._same_history)
                    # max() keeps the first of equals, the newest.
                    seq = max(same, key=lambda candidate: self._agreement(candidate, sent_reasoning))
                context = self.context_after(seq)
                return ContinuationPoint(self.turns[seq], tuple(messages[end:]), context, keys[-1], self._system[seq])
        return None

    def with_recorded_ids(self, messages: Sequence[Message], setup: str) -> tuple[Message, ...] | None:
        """Return the messages with the recorded ids of tool calls, for a harness that renames calls.

        Histories are matched by which result answers which call instead of by ids. Return None if no turn matches, if
        several match and differ in their ids, or if a changed id belongs to another call of this session: then the
        harness did not rename the call.
        """
        if not self.turns:
            return None
        self._number_turns()
        keys = history_keys(setup, _numbered(messages))
        for end in range(len(keys), 0, -1):
            same = self._by_numbered.get(keys[end - 1])
            if same:
                reasoning = [reasoning_of(message) for message in messages[:end]]
                agreed = {seq: self._agreement(seq, reasoning) for seq in same}
                best = [seq for seq in same if agreed[seq] == max(agreed.values())]
                first, *others = (self._renamed(messages, seq) for seq in best)
                return first if all(other == first for other in others) else None
        return None

    def _number_turns(self) -> None:
        """Index the turns added since the last call by keys with the position of each tool call in place of its id."""
        for turn in self.turns[len(self._numbered_history) :]:
            start, before = None, 0
            messages: list[Message] = [*turn.messages, turn.reply]
            if turn.parent is not None:
                # The parent's reply says which call the first results belong to.
                start, before = self._numbered_history[turn.parent], 1
                messages.insert(0, self.turns[turn.parent].reply)
            numbered = history_keys(turn.setup, _numbered(messages)[before:], start)[-1]
            self._numbered_history.append(numbered)
            self._call_ids.update(call_ids(turn.reply))
            if turn.finish_reason != "abort":
                self._by_numbered.setdefault(numbered, []).append(turn.seq)
                reply = message_key(*_numbered([turn.reply]))
                self._by_numbered_reply.setdefault(reply, []).append(turn.seq)

    def _names_others(self, message: Message, own: Message) -> bool:
        """Return whether a call in `message` has the id of a different call of this session than the one in `own`."""
        pairs = zip(call_ids(message), call_ids(own), strict=True)
        return any(call_id != own_id and call_id in self._call_ids for call_id, own_id in pairs)

    def _renamed(self, messages: Sequence[Message], seq: int) -> tuple[Message, ...] | None:
        """Return the messages with the call ids that the path to `seq` has; None if an id belongs to another call."""
        recorded = [message for turn in self.path(seq) for message in (*turn.messages, turn.reply)]
        if any(self._names_others(message, own) for message, own in zip(messages, recorded, strict=False)):
            return None

        def ids(index: int, message: Message) -> Sequence[Any]:
            return call_ids(recorded[index] if index < len(recorded) else message)

        return tuple(renamed_calls(messages, ids))

    def continuation_of_ids(self, prompt_ids: TokenIds, recorded_as: Message) -> ContinuationPoint:
        """Find the deepest turn, under any setup, with a context and completion that begin `prompt_ids`.

        A request with prompt ids has no messages: `recorded_as` is the new message of the returned point.
        """
        deepest: int | None = None
        start, level = 0, self._children.get(None, [])
        while level:
            for seq in reversed(level):
                turn = self.turns[seq]
                end = start + len(turn.added_ids) + len(turn.completion_ids)
                own = prompt_ids[start:end]
                # The prompt must have at least one new id after the turn.
                if end < len(prompt_ids) and np.array_equal(own, np.concatenate([turn.added_ids, turn.completion_ids])):
                    deepest, start, level = seq, end, self._children.get(seq, [])
                    break
            else:
                break
        parent = None if deepest is None else self.turns[deepest]
        return ContinuationPoint(parent, (recorded_as,), prompt_ids[:start])

    def context_before(self, seq: int) -> TokenIds:
        """Return the ids of the prompt of turn `seq`, int32 [tokens]."""
        turn = self.turns[seq]
        context = NO_IDS if turn.parent is None else self.context_after(turn.parent)
        return np.concatenate([context, turn.added_ids])

    def context_after(self, seq: int) -> TokenIds:
        """Return the ids from the root through the completion of turn `seq`, int32 [tokens], read-only."""
        # Read the attribute once: several threads may read the tree of a stored session.
        last = self._last_context or (-1, NO_IDS)
        if last[0] == seq:
            return last[1]
        pieces: list[TokenIds] = []
        ancestor: int | None = seq
        while ancestor is not None:
            turn = self.turns[ancestor]
            if last[0] == ancestor:
                pieces.append(last[1])
                break
            pieces += [turn.completion_ids, turn.added_ids]
            ancestor = turn.parent
        ids = np.concatenate(pieces[::-1])
        ids.flags.writeable = False
        self._last_context = seq, ids
        return ids

    def forget_context(self) -> None:
        """Drop the context that `context_after` cached last, to free its memory."""
        self._last_context = None

    def fork_cause(self, parent: int | None, messages: Sequence[Message], setup: str) -> str | None:
        """Return why a turn with this parent forks the session; None if it does not.

        `sibling`: the same messages were answered before. `branched`: the parent was continued with other messages.
        `new_setup`: tools or template settings changed. `edited_history`: no turn has the messages that begin the
        request. The prompt builder has three more causes: `template_rewrites`, the template can't append these
        messages; `template_history`, `history="template"` dropped part of earlier turns; `other_stop`, the parent ended
        with another stop token than the template writes, and `stop_mismatch="fork"`.
        """
        self._index_turns()
        if not self._children.get(parent) and (parent is not None or not self._by_history):
            return None
        start = None if parent is None else self._history[parent]
        if (parent, setup, [start, *history_keys(setup, messages, start)][-1]) in self._answered:
            return "sibling"
        if parent is not None:
            return "branched"
        return "edited_history" if any(turn.setup == setup for turn in self.turns) else "new_setup"

    def turn_of_reply(self, message: Message) -> Turn | None:
        """Return the newest turn with this reply; one with the same reasoning comes first. None if there is none."""
        self._index_turns()
        newest = self._by_reply.get(message_key(message)) if self.turns else None
        if newest is None:
            return None
        reasoning = reasoning_of(message)
        same = _linked(newest, self._same_reply)
        alike = (seq for seq in same if reasoning and reasoning_of(self.turns[seq].reply) == reasoning)
        return self.turns[next(alike, newest)]

    def turn_of_renamed_reply(self, message: Message) -> Turn | None:
        """Return the turn with this reply, where the tool calls may have other ids.

        Return None if an id belongs to another call of this session, or if several turns match and their completions
        differ.
        """
        self._number_turns()
        candidates = (self.turns[seq] for seq in self._by_numbered_reply.get(message_key(*_numbered([message])), ()))
        same = [turn for turn in candidates if not self._names_others(message, turn.reply)]
        reasoning = reasoning_of(message)
        same = [turn for turn in same if reasoning and reasoning_of(turn.reply) == reasoning] or same
        alike = all(np.array_equal(turn.completion_ids, same[-1].completion_ids) for turn in same)
        return same[-1] if same and alike else None

    def _agreement(self, leaf: int, reasoning: Sequence[str]) -> int:
        """Count the replies on the path to `leaf` that have the reasoning sent for them.

        `reasoning` has one entry per message of the path.
        """
        agreed, index = 0, len(reasoning)
        for turn in reversed(self.path(leaf)):
            index -= 1
            agreed += bool(reasoning[index]) and reasoning[index] == reasoning_of(turn.reply)
            index -= len(turn.messages)
        return agreed

    def leaves(self, *, unread: bool = False) -> list[int]:
        """Return the `seq` of every turn that no turn continues, in commit order, without aborted turns.

        Turns that no client read are left out too unless `unread` is True.
        """
        excluded = set[int]() if unread else {seq for seq in self.unread if self.is_unread(seq)}
        seqs = [turn.seq for turn in self.turns if turn.finish_reason != "abort" and turn.seq not in excluded]
        return [seq for seq in seqs if excluded.issuperset(self._children.get(seq, ()))]

    def is_unread(self, seq: int) -> bool:
        """Return whether a turn is marked as unread. A turn that a later one continues was read, despite its mark."""
        return seq in self.unread and not self.is_continued(seq)

    def is_continued(self, seq: int) -> bool:
        """Return whether a later turn continues this one. Aborted turns don't count."""
        return bool(self._children.get(seq))

    def path(self, leaf: int) -> list[Turn]:
        """Return the turns from the root to `leaf`."""
        turns: list[Turn] = []
        seq: int | None = leaf
        while seq is not None:
            turns.append(self.turns[seq])
            seq = self.turns[seq].parent
        return turns[::-1]


def unread_turns(events: Iterable[Event]) -> set[int]:
    """Return the turns that are marked as unread, by the last such event of each turn."""
    marks = {
        event.turn: event.body.get("unread") for event in events if event.kind == UNREAD and event.turn is not None
    }
    return {turn for turn, unread in marks.items() if unread}


def _numbered(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each tool call's id replaced by the call's position in its message."""
    return renamed_calls(messages, lambda _, message: range(len(call_ids(message))))


def _linked(newest: int, before: Mapping[int, int]) -> Iterator[int]:
    """Yield a turn and the earlier turns that `before` links it to, newest first."""
    seq: int | None = newest
    while seq is not None:
        yield seq
        seq = before.get(seq)
