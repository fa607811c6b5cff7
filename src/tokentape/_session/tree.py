"""Keep a session in memory as an append-only tree of turns, and find the turn that a request continues."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct

from tokentape._session.matching import (
    call_ids,
    chained,
    history_keys,
    message_key,
    reasoning_of,
    renamed_calls,
    with_name,
)
from tokentape._session.messages import LazyMessages
from tokentape.types import Event, Message, SessionInfo, TokenIds, Turn

UNREAD = "unread"
"""Kind of the events that record whether a client disconnected before the reply's end. Body: `{"unread": true}`."""

_MOST_ALIKE = 100
"""Maximum number of turns with the same reply among which the turn of a message is looked for."""

NO_IDS: TokenIds = np.empty(0, dtype=np.int32)
"""The context of a turn without a parent."""


class ContinuationPoint(Struct, frozen=True):
    """The turn that a request continues, and the request's new messages."""

    parent: Turn | None
    """The deepest turn whose history is a prefix of the request; None if the request is rendered from the start."""
    new_messages: tuple[Message, ...]
    """The request's messages after the parent's history."""
    context_ids: TokenIds
    """The parent's context and completion; empty without a parent."""
    key: bytes = b""
    """The key for the request's whole history, see `history_keys`."""
    system: bool = False
    """Whether the parent's history has a system or developer message."""
    key_before: bytes = b""
    """The key for the history without its last message, if the request is rendered from the start."""


class Session:
    """The tree of a session's turns. Only `add` changes it, and it only appends."""

    def __init__(self, info: SessionInfo, turns: Iterable[Turn] = (), events: Iterable[Event] = ()) -> None:
        self.info = info
        self.unread = unread_turns(events)
        """The `seq` of each turn that is marked as not completely read by any client; see `leaves`."""
        self.turns: list[Turn] = []
        self._history: list[bytes] = []
        """For each turn, the key of its whole message history, including the reply."""
        self._system: list[bool] = []
        """For each turn, whether its history has a system or developer message."""
        self._by_history: dict[bytes, int] = {}
        self._same_history: dict[int, int] = {}
        """Maps a turn to an earlier turn with the same history key, which does not depend on replies' reasoning."""
        self._children: dict[int | None, list[int]] = {}
        self._answered: set[tuple[int | None, str, bytes | None]] = set()
        """(parent, setup, key of the new messages) for every turn. A request with the same three is a sibling."""
        self._numbered_history: list[bytes] = []
        """Like `_history`, but with each tool call's position in place of its id; filled by `_number_turns`."""
        self._by_numbered: dict[bytes, list[int]] = {}
        self._by_numbered_reply: dict[bytes, list[int]] = {}
        self._numbered_ends: list[tuple[bytes, bytes]] = []
        """For each turn in `_numbered_history`, the keys of its last new message and of its reply."""
        self._call_ids: set[Any] = set()
        """The ids of all tool calls in the replies of the turns in `_numbered_history`."""
        self._last_context: tuple[int, TokenIds] | None = None
        self._request_keys: list[bytes] = []
        """The request's history key, if known, for each turn that is not yet in `_history`."""
        for turn in turns:
            self.add(turn)

    def add(self, turn: Turn, request_key: bytes = b"") -> None:
        """Append a committed turn. `request_key` is its request's history key, if the caller knows it.

        Raises ValueError unless the turn's `seq` is the next number and its parent is in the tree.
        """
        if turn.seq != len(self.turns) or (turn.parent is not None and turn.parent >= turn.seq):
            raise ValueError(f"turn {turn.seq} (parent {turn.parent}) can't follow {len(self.turns)} turns")
        self.turns.append(turn)
        self._request_keys.append(request_key)
        if turn.finish_reason != "abort":
            self._children.setdefault(turn.parent, []).append(turn.seq)

    def _index_turns(self) -> None:
        """Index the turns added since the last call by their messages' keys. Not needed to read a record."""
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
                self._by_history[key] = turn.seq
                self._answered.add((turn.parent, turn.setup, answered))
        self._request_keys.clear()

    def continuation(self, messages: Sequence[Message], setup: str) -> ContinuationPoint:
        """Find the deepest turn with the same setup whose history is a prefix of `messages`.

        If several turns have the same history, prefer the turn whose reasoning was sent back, then the newest turn.
        """
        self._index_turns()
        keys, point = list[bytes](), None
        if isinstance(messages, LazyMessages) and messages.setup == setup:
            keys = [messages.key, *history_keys(setup, messages.tail, messages.key)]
            point = self._after(messages.tail, keys[1:], None)
        if point is None and (self.turns or not keys):
            keys = history_keys(setup, messages)
            point = self._after(messages, keys, lambda end: [reasoning_of(message) for message in messages[:end]])
        before, key = [b"", b"", *keys][-2:]
        return point or ContinuationPoint(None, tuple(messages[:]), NO_IDS, key, key_before=before)

    def _after(
        self, messages: Sequence[Message], keys: Sequence[bytes], reasoning: Callable[[int], list[str]] | None
    ) -> ContinuationPoint | None:
        """Return the deepest turn with one of `keys`, which are the history keys after each of `messages`.

        `reasoning(n)` returns the reasoning in the request's first n messages. Return None if no turn matches, or if
        several turns have the same history and `reasoning` is None.
        """
        for end in range(len(keys), 0, -1):
            newest = self._by_history.get(keys[end - 1])
            if newest is not None:
                seq = newest
                if newest in self._same_history:
                    if reasoning is None:
                        return None
                    sent_reasoning, same = reasoning(end), _linked(newest, self._same_history)
                    # If several agree equally, max() returns the first, which is the newest.
                    seq = max(same, key=lambda candidate: self._agreement(candidate, sent_reasoning))
                context = self.context_after(seq)
                return ContinuationPoint(self.turns[seq], tuple(messages[end:]), context, keys[-1], self._system[seq])
        return None

    def with_recorded_ids(self, messages: Sequence[Message], setup: str) -> tuple[Message, ...] | None:
        """Return the messages with the recorded tool call ids and names, for a harness that renames calls or speakers.

        Histories are matched by which result answers which call, not by ids, and without the names of assistants.
        Return None if no turn matches, if several match and differ in ids or names, or if a changed id belongs to a
        different call in this session, because the harness then did not rename the call.
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
        """Index the turns added since the last call by keys with each tool call's position in place of its id."""
        for turn in self.turns[len(self._numbered_history) :]:
            start, before = None, 0
            messages: list[Message] = [*turn.messages, turn.reply]
            if turn.parent is not None:
                # The parent's reply shows to which call the first results belong.
                start, before = self._numbered_history[turn.parent], 1
                messages.insert(0, self.turns[turn.parent].reply)
            keys = [message_key(message) for message in _numbered(messages)]
            numbered = chained(turn.setup, keys[before:], start)[-1]
            self._numbered_history.append(numbered)
            self._numbered_ends.append((keys[-2] if len(keys) > 1 else b"", keys[-1]))
            self._call_ids.update(call_ids(turn.reply))
            if turn.finish_reason != "abort":
                self._by_numbered.setdefault(numbered, []).append(turn.seq)
                self._by_numbered_reply.setdefault(keys[-1], []).append(turn.seq)

    def _names_others(self, message: Message, own: Message) -> bool:
        """Return whether a call in `message` has an id that is not its id in `own` but a different call's."""
        pairs = zip(call_ids(message), call_ids(own), strict=True)
        return any(call_id != own_id and call_id in self._call_ids for call_id, own_id in pairs)

    def _renamed(self, messages: Sequence[Message], seq: int) -> tuple[Message, ...] | None:
        """Return the messages with the ids and names on the path to `seq`; None if an id is a different call's."""
        recorded = [message for turn in self.path(seq) for message in (*turn.messages, turn.reply)]
        if any(self._names_others(message, own) for message, own in zip(messages, recorded, strict=False)):
            return None

        def ids(index: int, message: Message) -> Sequence[Any]:
            return call_ids(recorded[index] if index < len(recorded) else message)

        named = [with_name(message, own.get("name")) for message, own in zip(messages, recorded, strict=False)]
        return tuple(renamed_calls([*named, *messages[len(named) :]], ids))

    def continuation_of_ids(self, prompt_ids: TokenIds, recorded_as: Message) -> ContinuationPoint:
        """Find the deepest turn, with any setup, whose context and completion are a prefix of `prompt_ids`.

        A request with prompt ids has no messages: `recorded_as` becomes the new message in the returned point.
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
        """Return the prompt ids of turn `seq`, int32 [tokens]."""
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
        """Drop the context that `context_after` cached, to free its memory."""
        self._last_context = None

    def fork_cause(
        self, parent: int | None, messages: Sequence[Message], setup: str, prompt_ids: TokenIds | None = None
    ) -> str | None:
        """Return why a turn with this parent forks the session; None if it does not.

        `prompt_ids` are the ids that a prompt of ids adds: all such prompts have the same message.

        `sibling`: the same messages were answered before. `branched`: the parent was continued with different messages.
        `new_setup`: tools or template settings changed. `edited_history`: no turn's history is a prefix of the request.
        The gateway adds four causes: `template_rewrites`, the template can't append these messages; `template_history`,
        `history="template"` dropped part of earlier turns; `other_stop`, the parent ended with a different stop token
        than the template writes, and `stop_mismatch` is "fork"; `drift`, see `ServerRenderedCall`.
        """
        self._index_turns()
        if not self._children.get(parent) and (parent is not None or not self._by_history):
            return None
        start = None if parent is None else self._history[parent]
        answered = (parent, setup, [start, *history_keys(setup, messages, start)][-1]) in self._answered
        others = [] if prompt_ids is None else [self.turns[seq].added_ids for seq in self._children.get(parent, ())]
        if answered and (prompt_ids is None or any(np.array_equal(ids, prompt_ids) for ids in others)):
            return "sibling"
        if parent is not None:
            return "branched"
        return "edited_history" if any(turn.setup == setup for turn in self.turns) else "new_setup"

    def sampled_replies(self, messages: Sequence[Message], parent: int | None = None) -> dict[int, Turn]:
        """Map the indexes of assistant messages to the turns that sampled them. No turn is used twice.

        If the messages continue turn `parent`, those on its path are known. The others need evidence, because clients
        write assistant messages too (examples for a subagent, cached answers), and many replies are equal: the recorded
        ids of tool calls, equal reasoning, or an equal message before; else that the reply before or after was sampled
        by the turn before or after. Replies are equal even if a harness renamed them or their tool calls.
        """
        replies: dict[int, Turn] = {}
        known = -1
        for turn in [] if parent is None else self.path(parent):
            known += len(turn.messages) + 1
            replies[known] = turn
        # A turn that began a branch has earlier replies among its messages.
        speakers = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
        if not self.turns or replies.keys() >= set(speakers):
            return replies
        self._number_turns()
        keys = [message_key(message) for message in _numbered(messages)]
        used = {turn.seq for turn in replies.values()}

        def accept(n: int, turns: Iterable[Turn]) -> None:
            """Take the first of these turns that may have sampled message `n`."""
            for turn in turns:
                same = self._numbered_ends[turn.seq][1] == keys[n]
                if same and turn.seq not in used and not self._names_others(messages[n], turn.reply):
                    replies[n] = turn
                    used.add(turn.seq)
                    return

        # An edit mostly leaves the newest messages unchanged, so begin with them.
        end, following = len(self.turns), None
        for n in reversed(speakers):
            following = replies.get(n) or self._turn_alike(n, messages, keys, used, end, following)
            if following is not None:
                accept(n, [following])
                end = following.seq
        for n, after in reversed(list(pairwise(speakers))):
            parent = replies[after].parent if after in replies and n not in replies else None
            accept(n, [] if parent is None else [self.turns[parent]])
        for before, n in pairwise(speakers):
            if before in replies and n not in replies:
                accept(n, [self.turns[seq] for seq in reversed(self._children.get(replies[before].seq, ()))])
        return replies

    def _turn_alike(
        self,
        n: int,
        messages: Sequence[Message],
        keys: Sequence[bytes],
        used: Set[int],
        end: int,
        following: Turn | None,
    ) -> Turn | None:
        """Return the turn before turn `end` that most likely sampled message `n`; None if nothing in it shows that.

        `keys` are the messages' keys with each tool call's position in place of its id, and `used` turns sampled other
        messages. Of several equally likely turns, return the parent of `following`, which sampled the next reply, or
        else the newest.
        """
        ids, reasoning = call_ids(messages[n]), reasoning_of(messages[n])
        same = self._by_numbered_reply.get(keys[n], [])
        candidates = []
        for seq in same[: bisect_left(same, end)][: -_MOST_ALIKE - 1 : -1]:
            turn = self.turns[seq]
            evidence = (
                bool(ids) and ids == call_ids(turn.reply),
                bool(reasoning) and reasoning == reasoning_of(turn.reply),
                n > 0 and keys[n - 1] == self._numbered_ends[seq][0],
            )
            if any(evidence) and seq not in used and not self._names_others(messages[n], turn.reply):
                candidates.append((evidence, following is not None and following.parent == seq, turn))
        if not candidates:
            return None
        best = max(candidate[:2] for candidate in candidates)
        newest, *others = [turn for *evidence, turn in candidates if tuple(evidence) == best]
        # Of several replies whose calls were renamed it can't be known which this one is, unless their ids are equal.
        renamed = bool(ids) and ids != call_ids(newest.reply)
        unclear = renamed and any(not np.array_equal(turn.completion_ids, newest.completion_ids) for turn in others)
        return None if unclear else newest

    def _agreement(self, leaf: int, reasoning: Sequence[str]) -> int:
        """Count the replies on the path to `leaf` whose reasoning equals the reasoning that was sent back.

        `reasoning` has one entry per message on the path.
        """
        agreed, index = 0, len(reasoning)
        for turn in reversed(self.path(leaf)):
            index -= 1
            agreed += bool(reasoning[index]) and reasoning[index] == reasoning_of(turn.reply)
            index -= len(turn.messages)
        return agreed

    def leaves(self, *, unread: bool = False) -> list[int]:
        """Return the `seq` of every turn that no turn continues, in commit order, without aborted turns.

        Turns that no client read are also left out unless `unread` is True.
        """
        excluded = set[int]() if unread else {seq for seq in self.unread if self.is_unread(seq)}
        seqs = [turn.seq for turn in self.turns if turn.finish_reason != "abort" and turn.seq not in excluded]
        return [seq for seq in seqs if excluded.issuperset(self._children.get(seq, ()))]

    def is_unread(self, seq: int) -> bool:
        """Return whether a turn is marked as unread and not continued. A turn that was continued was read."""
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
    """Return the turns whose last event of kind `UNREAD` marks them as unread."""
    marks = {
        event.turn: event.body.get("unread") for event in events if event.kind == UNREAD and event.turn is not None
    }
    return {turn for turn, unread in marks.items() if unread}


def _numbered(messages: Sequence[Message]) -> list[Message]:
    """Replace each tool call's id by the call's position in its message, and leave out the names of assistants."""
    unnamed = [with_name(message, None) for message in messages]
    return renamed_calls(unnamed, lambda _, message: range(len(call_ids(message))))


def _linked(newest: int, before: Mapping[int, int]) -> Iterator[int]:
    """Yield a turn and the earlier turns to which `before` links it, newest first."""
    seq: int | None = newest
    while seq is not None:
        yield seq
        seq = before.get(seq)
