"""One session in memory: an append-only tree of turns, and where a request continues it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from tokentape._session.matching import call_ids, chained, history_keys, message_key, reasoning_of, renamed_calls
from tokentape.types import Event, Message, SessionInfo, TokenIds, Turn

UNREAD = "unread"
"""Kind of events: whether the client of a turn left before it had all of the reply. Body: `{"unread": true}`."""

NO_IDS: TokenIds = np.empty(0, dtype=np.int32)
"""The context of a turn that has no parent."""


@dataclass(frozen=True, slots=True)
class ContinuationPoint:
    """Where a request continues a session."""

    parent: Turn | None
    """The deepest turn whose messages begin the request; None to render from nothing."""
    new_messages: tuple[Message, ...]
    """The request's messages after those of the parent."""
    context_ids: TokenIds
    """The parent's context and completion; empty without a parent."""
    key: bytes = b""
    """Of the history that the request's messages are; see `history_keys`."""
    system: bool = False
    """Whether a message before the new ones is the system's or the developer's."""


class LazyMessages(Sequence[Message]):
    """The messages of a request, which `read` returns and which are read only if something looks at them.

    `tail` are the last of them. The messages before are a history with this `key` under the setup with this digest, see
    `history_keys`.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[Message]],
        tail: Sequence[Message] = (),
        key: bytes = b"",
        setup: str = "",
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
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Message, ...]: ...
    def __getitem__(self, at: int | slice) -> Message | tuple[Message, ...]:
        return self._all()[at]

    def __len__(self) -> int:
        return len(self._all())


class Session:
    """A session's turns. Only `add` changes it, and only by appending."""

    def __init__(self, info: SessionInfo, turns: Iterable[Turn] = (), events: Iterable[Event] = ()) -> None:
        self.info = info
        self.unread = unread_turns(events)
        """`seq` of turns that no client read to their end, as far as the gateway knows; see `leaves`."""
        self.turns: list[Turn] = []
        self._history: list[bytes] = []
        """Per turn the key of its whole message history, reply included."""
        self._system: list[bool] = []
        """Per turn whether its history has a message of the system's or the developer's."""
        self._by_history: dict[bytes, int] = {}
        self._by_reply: dict[bytes, int] = {}
        self._same_history: dict[int, int] = {}
        """The turn before this one with the same history; replies that differ in their reasoning only have the same."""
        self._same_reply: dict[int, int] = {}
        self._children: dict[int | None, list[int]] = {}
        self._answered: set[tuple[int | None, str, bytes | None]] = set()
        """Parent, setup and key of the new messages of every turn: a request with the same ones is a sibling."""
        self._numbered_history: list[bytes] = []
        """As `_history`, calls known by their place instead of their id, of the turns that were indexed so."""
        self._by_numbered: dict[bytes, list[int]] = {}
        self._by_numbered_reply: dict[bytes, list[int]] = {}
        self._call_ids: set[Any] = set()
        """Ids of the calls in replies, of the same turns."""
        self._last_context: tuple[int, TokenIds] | None = None
        for turn in turns:
            self.add(turn)

    def add(self, turn: Turn) -> None:
        """Append a committed turn. Its `seq` is the next one and its parent is here."""
        if turn.seq != len(self.turns) or (turn.parent is not None and turn.parent >= turn.seq):
            raise ValueError(f"turn {turn.seq} (parent {turn.parent}) can't follow {len(self.turns)} turns")
        start = None if turn.parent is None else self._history[turn.parent]
        reply = message_key(turn.reply)
        *sent, key = chained(turn.setup, [*map(message_key, turn.messages), reply], start)
        self.turns.append(turn)
        self._history.append(key)
        spoken = any(message.get("role") in ("system", "developer") for message in turn.messages)
        self._system.append(spoken or (turn.parent is not None and self._system[turn.parent]))
        if turn.finish_reason != "abort":
            if key in self._by_history:
                self._same_history[turn.seq] = self._by_history[key]
            if reply in self._by_reply:
                self._same_reply[turn.seq] = self._by_reply[reply]
            self._by_history[key] = self._by_reply[reply] = turn.seq
            self._children.setdefault(turn.parent, []).append(turn.seq)
            self._answered.add((turn.parent, turn.setup, [start, *sent][-1]))

    def continuation(self, messages: Sequence[Message], setup: str) -> ContinuationPoint:
        """Find the deepest turn, under the same setup, whose messages are a prefix of `messages`.

        Of several with the same messages the one whose reasoning was sent back, else the last one committed.
        """
        if isinstance(messages, LazyMessages) and messages.setup == setup:
            found = self._after(messages.tail, history_keys(setup, messages.tail, messages.key), None)
            if found is not None:
                return found
        keys = history_keys(setup, messages)
        found = self._after(messages, keys, lambda end: [reasoning_of(message) for message in messages[:end]])
        return found or ContinuationPoint(None, tuple(messages), NO_IDS, keys[-1] if keys else b"")

    def _after(
        self, messages: Sequence[Message], keys: Sequence[bytes], reasoning: Callable[[int], list[str]] | None
    ) -> ContinuationPoint | None:
        """Return the deepest turn whose history has one of `keys`, those of the histories through each of `messages`.

        `reasoning` returns that of the first messages. None if there is no turn, or if there are several with the same
        history and `reasoning` is not known.
        """
        for end in range(len(keys), 0, -1):
            newest = self._by_history.get(keys[end - 1])
            if newest is not None:
                seq = newest
                if newest in self._same_history:
                    if reasoning is None:
                        return None
                    sent, same = reasoning(end), _linked(newest, self._same_history)
                    # max() keeps the first of equals, the newest.
                    seq = max(same, key=lambda one: self._agreement(one, sent))
                context = self.context_after(seq)
                return ContinuationPoint(self.turns[seq], tuple(messages[end:]), context, keys[-1], self._system[seq])
        return None

    def with_recorded_ids(self, messages: Sequence[Message], setup: str) -> tuple[Message, ...] | None:
        """Return the messages with the recorded ids of tool calls, for a harness that gave calls ids of its own.

        What has to match instead is which call each result belongs to. None if no turn matches, or if an id that was
        changed is the id of another call that was sampled in this session: then the harness does not rename. None also
        if several turns match that differ in their ids.
        """
        self._number_turns()
        keys = history_keys(setup, _numbered(messages))
        for end in range(len(keys), 0, -1):
            same = self._by_numbered.get(keys[end - 1])
            if same:
                sent = [reasoning_of(message) for message in messages[:end]]
                agreed = {seq: self._agreement(seq, sent) for seq in same}
                best = [seq for seq in same if agreed[seq] == max(agreed.values())]
                first, *others = (self._renamed(messages, seq) for seq in best)
                return first if all(one == first for one in others) else None
        return None

    def _number_turns(self) -> None:
        """Index the turns that are new by keys in which calls are known by their place."""
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

    def _names_others(self, sent: Message, own: Message) -> bool:
        """Return whether a call in `sent` has another id than in `own` and that of another call sampled here."""
        pairs = zip(call_ids(sent), call_ids(own), strict=True)
        return any(one != other and one in self._call_ids for one, other in pairs)

    def _renamed(self, messages: Sequence[Message], seq: int) -> tuple[Message, ...] | None:
        """Return the messages with the ids of the path to `seq`, which they begin with."""
        recorded = [message for turn in self.path(seq) for message in (*turn.messages, turn.reply)]
        if any(self._names_others(sent, own) for sent, own in zip(messages, recorded, strict=False)):
            return None
        return tuple(renamed_calls(messages, lambda at, one: call_ids(recorded[at] if at < len(recorded) else one)))

    def continuation_of_ids(self, prompt_ids: TokenIds, stand_in: Message) -> ContinuationPoint:
        """Find the deepest turn, under any setup, whose context and completion begin `prompt_ids`.

        `stand_in` takes the place of the messages that such a request does not have.
        """
        deepest: int | None = None
        start, level = 0, self._children.get(None, [])
        while level:
            for seq in reversed(level):
                turn = self.turns[seq]
                end = start + len(turn.added_ids) + len(turn.completion_ids)
                own = prompt_ids[start:end]
                # New messages have to follow the turn.
                if end < len(prompt_ids) and np.array_equal(own, np.concatenate([turn.added_ids, turn.completion_ids])):
                    deepest, start, level = seq, end, self._children.get(seq, [])
                    break
            else:
                break
        parent = None if deepest is None else self.turns[deepest]
        return ContinuationPoint(parent, (stand_in,), prompt_ids[:start])

    def context_before(self, seq: int) -> TokenIds:
        """The ids that were sent for turn `seq`, int32 [tokens]."""
        turn = self.turns[seq]
        context = NO_IDS if turn.parent is None else self.context_after(turn.parent)
        return np.concatenate([context, turn.added_ids])

    def context_after(self, seq: int) -> TokenIds:
        """The ids of the path from the root through turn `seq`'s completion, int32 [tokens]."""
        # Read once: a stored session's tree may be read in several threads.
        last = self._last_context or (-1, NO_IDS)
        if last[0] == seq:
            return last[1]
        pieces: list[TokenIds] = []
        at: int | None = seq
        while at is not None:
            turn = self.turns[at]
            if last[0] == at:
                pieces.append(last[1])
                break
            pieces += [turn.completion_ids, turn.added_ids]
            at = turn.parent
        ids = np.concatenate(pieces[::-1])
        ids.flags.writeable = False
        self._last_context = seq, ids
        return ids

    def forget_context(self) -> None:
        """Let go of the ids that `context_after` has put together last; they are put together again when asked for."""
        self._last_context = None

    def fork_cause(self, parent: int | None, messages: Sequence[Message], setup: str) -> str | None:
        """Why a turn with this parent would be a fork; None if it continues the session's newest turn.

        `sibling`: the same messages were answered before. `branched`: an earlier turn is continued another way.
        `new_setup`: tools or template settings changed. `edited_history`: the messages match no turn from the start.
        More causes are not the agent's: `template_rewrites`, the template can't append what is asked for;
        `template_history`, it drops part of earlier turns and was asked to; `other_stop`, the turn before ended with
        another stop token than the template writes, and such a turn is not to be continued.
        """
        if not self._children.get(parent) and (parent is not None or not self._by_history):
            return None
        start = None if parent is None else self._history[parent]
        if (parent, setup, [start, *history_keys(setup, messages, start)][-1]) in self._answered:
            return "sibling"
        if parent is not None:
            return "branched"
        return "edited_history" if any(turn.setup == setup for turn in self.turns) else "new_setup"

    def turn_of_reply(self, message: Message) -> Turn | None:
        """Return the newest turn with this message as its reply, preferring one with the same reasoning."""
        newest = self._by_reply.get(message_key(message))
        if newest is None:
            return None
        reasoning = reasoning_of(message)
        same = _linked(newest, self._same_reply)
        alike = (seq for seq in same if reasoning and reasoning_of(self.turns[seq].reply) == reasoning)
        return self.turns[next(alike, newest)]

    def turn_of_renamed_reply(self, message: Message) -> Turn | None:
        """Return the turn whose reply is this message but for the ids of its calls.

        None if an id is that of another call sampled in this session, or if the replies that fit differ in their ids of
        tokens.
        """
        self._number_turns()
        found = (self.turns[seq] for seq in self._by_numbered_reply.get(message_key(*_numbered([message])), ()))
        same = [turn for turn in found if not self._names_others(message, turn.reply)]
        reasoning = reasoning_of(message)
        same = [turn for turn in same if reasoning and reasoning_of(turn.reply) == reasoning] or same
        alike = all(np.array_equal(turn.completion_ids, same[-1].completion_ids) for turn in same)
        return same[-1] if same and alike else None

    def _agreement(self, leaf: int, reasoning: Sequence[str]) -> int:
        """How many replies on the path to `leaf` have the reasoning that was sent in their place.

        `reasoning` is that of each message on the path.
        """
        agreed, at = 0, len(reasoning)
        for turn in reversed(self.path(leaf)):
            at -= 1
            agreed += bool(reasoning[at]) and reasoning[at] == reasoning_of(turn.reply)
            at -= len(turn.messages)
        return agreed

    def leaves(self, *, unread: bool = False) -> list[int]:
        """Return `seq` of every turn that nothing continues, aborted ones left out, in order of commits.

        A turn that no client read is left out too unless `unread`.
        """
        out = set[int]() if unread else {seq for seq in self.unread if self.is_unread(seq)}
        kept = [turn.seq for turn in self.turns if turn.finish_reason != "abort" and turn.seq not in out]
        return [seq for seq in kept if out.issuperset(self._children.get(seq, ()))]

    def is_unread(self, seq: int) -> bool:
        """Return whether no client read a turn. One that a later turn continues was read, whatever its mark says."""
        return seq in self.unread and not self.is_continued(seq)

    def is_continued(self, seq: int) -> bool:
        """Return whether a later turn continues this one; an aborted one does not."""
        return bool(self._children.get(seq))

    def path(self, leaf: int) -> list[Turn]:
        """The turns from the root to `leaf`."""
        turns: list[Turn] = []
        at: int | None = leaf
        while at is not None:
            turns.append(self.turns[at])
            at = self.turns[at].parent
        return turns[::-1]


def unread_turns(events: Iterable[Event]) -> set[int]:
    """Return the turns that are marked as unread; the last event of a turn counts."""
    marks = {one.turn: one.body.get("unread") for one in events if one.kind == UNREAD and one.turn is not None}
    return {turn for turn, unread in marks.items() if unread}


def _numbered(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each call's place in its message in place of its id."""
    return renamed_calls(messages, lambda _, message: range(len(call_ids(message))))


def _linked(newest: int, before: Mapping[int, int]) -> Iterator[int]:
    """A turn and those that it is linked to, newest first."""
    at: int | None = newest
    while at is not None:
        yield at
        at = before.get(at)
