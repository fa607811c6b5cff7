"""Index a session's branches for the rules in `lineage`. Everything is computed at most once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np

from tokentape._session.matching import message_key
from tokentape._session.similarity import Runs, TextIndex, normalized, probes, shingles, similar, start
from tokentape._session.tree import Session
from tokentape.types import Message, SessionInfo, Turn

CLIENT = "client"
"""The key in `Turn.sampling` for the fields from the harness's headers; see `gateway._keys`."""

_TAG = re.compile(r"<([\w-]+)>")

WINDOW = 256
"""The maximum number of earlier turns with which a branch is compared."""


class Recorded(Protocol):
    """A session that headers may name as a parent, in memory or read from a store."""

    @property
    def info(self) -> SessionInfo: ...
    @property
    def turns(self) -> Sequence[Turn]: ...


def client_of(turn: Turn) -> Mapping[str, Any]:
    """Return the fields that the gateway read from a turn's request headers."""
    fields = turn.sampling.get(CLIENT)
    return fields if isinstance(fields, dict) else {}


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return normalized(content) if isinstance(content, str) else ""


def _without_notes(text: str) -> str:
    """Remove the tagged blocks that a harness puts before the user's text, unless nothing would be left.

    >>> _without_notes("<system-reminder>It is Monday.</system-reminder> Count the <b>files</b>.")
    'Count the <b>files</b>.'
    """
    rest = text
    while (tag := _TAG.match(rest)) and (end := rest.find(close := f"</{tag[1]}>")) > 0:
        rest = rest[end + len(close) :].strip()
    return rest or text


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings in a tool call's arguments."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _arguments(turn: Turn) -> Iterator[str]:
    """Yield the strings in a reply's tool-call arguments that are long enough to be a task."""
    for call in turn.reply.get("tool_calls") or ():
        arguments = (call.get("function") or {}).get("arguments")
        try:
            strings = list(_strings(json.loads(arguments) if isinstance(arguments, str) else arguments))
        except (ValueError, RecursionError):
            continue
        yield from (text for text in map(normalized, strings) if len(text) >= 12)


class Branch:
    """A branch, represented by its first turn and that turn's new messages as normalized texts."""

    def __init__(self, turn: Turn, texts: Sequence[str], keys: Iterable[bytes], root: Branch | None) -> None:
        self.turn, self.new, self.text = turn, texts, " ".join(texts)
        self.keys = frozenset(keys)
        by_role = [(message.get("role"), text) for message, text in zip(turn.messages, texts, strict=True)]
        self.users = [_without_notes(text) for role, text in by_role if role == "user"]
        """The user messages, without the harness's notes before the user's text."""
        self.tasks = frozenset(filter(None, self.users))
        system = " ".join(text for role, text in by_role if role in ("system", "developer"))
        self.system: str = root.system if root else system
        self.user: str = root.user if root else next(filter(None, self.users), "")
        """The root's first user message that is not empty."""


class Branches:
    """A session's branches and indexes over its turns."""

    def __init__(self, session: Session, others: Mapping[str, Recorded]) -> None:
        self.session, self.others, self.turns = session, others, session.turns
        self.texts = [[_text(message) for message in turn.messages] for turn in self.turns]
        self.replies = [_text(turn.reply) for turn in self.turns]
        self.keys = [[*map(message_key, turn.messages), message_key(turn.reply)] for turn in self.turns]
        self.reply_keys = {self.keys[turn.seq][-1]: turn.seq for turn in self.turns if turn.finish_reason != "abort"}
        self.children: dict[int | None, list[Turn]] = {}
        self.root: list[int] = []
        self.length: dict[int | None, int] = {None: 0}
        """For each turn, the number of messages on its path, including its reply."""
        self.same: dict[int, Turn] = {}
        """Maps a turn to the newest earlier turn with the same parent, setup and messages, if there is one."""
        self.by_client: dict[Any, list[Turn]] = {}
        """Turns by the harness's own session id, which headers contain."""
        self.all: dict[int, Branch] = {}
        self.first_sent: dict[bytes, int] = {}
        """By message key, the first turn that got the message as a new message."""
        requests: dict[Any, Turn] = {}
        for turn in self.turns:
            seq, parent = turn.seq, turn.parent
            self.root.append(seq if parent is None else self.root[parent])
            if parent is None or parent in self.children:
                root = None if parent is None else self.branch_of(parent)
                self.all[seq] = Branch(turn, self.texts[seq], self.keys[seq][:-1], root)
            self.children.setdefault(parent, []).append(turn)
            for key in self.keys[seq][:-1]:
                self.first_sent.setdefault(key, seq)
            self.length[seq] = self.length[parent] + len(self.keys[seq])
            request = parent, turn.setup, *self.keys[seq][:-1]
            if request in requests:
                self.same[seq] = requests[request]
            requests[request] = turn
            self.by_client.setdefault(client_of(turn).get("session"), []).append(turn)
        self.last = list(range(len(self.turns)))
        """For each turn, the newest turn in its subtree."""
        for turn in reversed(self.turns):
            if turn.parent is not None:
                self.last[turn.parent] = max(self.last[turn.parent], self.last[turn.seq])
        self._arguments: dict[int, list[str]] = {}
        # Cache two texts per turn that a branch is compared with. The shingles of all texts might not fit in memory.
        self._shingles = lru_cache(2 * WINDOW)(shingles)
        # Cache only two, because the shingles of a whole conversation take megabytes.
        self._of_conversation = lru_cache(2)(shingles)
        self._quoted_in = lru_cache(8)(lambda text: self._replies.found_in(self._of_conversation(text)))
        self.similar = lru_cache(2 * WINDOW)(lambda *texts: similar(*map(self._shingles, texts)))
        """Returns whether two texts are similar; see `similarity.similar`."""

    def earlier(self, branch: Branch) -> Iterator[Turn]:
        """Yield the turns before a branch's first turn that are not on its path, newest first, within `WINDOW`."""
        first, ancestor = max(branch.turn.seq - WINDOW, 0), branch.turn.parent
        for turn in reversed(self.turns[first : branch.turn.seq]):
            if turn.seq == ancestor:
                ancestor = turn.parent
            else:
                yield turn

    def branch_of(self, seq: int) -> Branch:
        """Return the branch of the root from which a turn descends."""
        return self.all[self.root[seq]]

    def single(self, branch: Branch) -> bool:
        """Return whether a branch has only one turn, ignoring aborted continuations."""
        return not any(child.finish_reason != "abort" for child in self.children.get(branch.turn.seq, ()))

    def path_keys(self, seq: int) -> list[bytes]:
        """Return the message keys on the path to a turn, including its reply."""
        return [key for turn in self.session.path(seq) for key in self.keys[turn.seq]]

    def arguments(self, turn: Turn) -> list[str]:
        """Return the strings in a turn's tool calls that may be a subagent's task. It may be another session's turn."""
        if id(turn) not in self._arguments:
            self._arguments[id(turn)] = list(_arguments(turn))
        return self._arguments[id(turn)]

    def quoted(self, seq: int, text: str) -> bool:
        """Return whether a text quotes a turn's reply."""
        return self._quoted_in(text)[seq] * 2 >= len(self._probes[seq])

    @cached_property
    def _probes(self) -> Mapping[int, Runs]:
        return {seq: probes(text) for seq, text in enumerate(self.replies)}

    @cached_property
    def _replies(self) -> TextIndex:
        return TextIndex(self._probes)

    @cached_property
    def heard(self) -> Mapping[int, set[int]]:
        """For each turn, later roots in the same team: they have the same task, and the turn's reply as a user message.

        A name may precede the reply. Side calls differ: they have the replies as assistant messages, or in one text.
        """
        later_roots: dict[int, set[int]] = {}
        for root in self._roots():
            for turn in self.earlier(root):
                other, reply = self.branch_of(turn.seq), self.replies[turn.seq]
                if other.user not in root.tasks or other.system == root.system or len(reply) < 12:
                    continue
                if any(text.endswith(reply) for text in root.tasks if text != other.user):
                    later_roots.setdefault(turn.seq, set()).add(root.turn.seq)
        return later_roots

    @cached_property
    def returned(self) -> Mapping[int, Turn]:
        """For each root, the turn in an earlier branch that got the root's last reply as a tool's result.

        If several turns got the same result, the last turn is used.
        """
        roots = ((branch.turn.seq, self.replies[self.last[branch.turn.seq]]) for branch in self._roots())
        last = {seq: text for seq, text in roots if len(text) >= 12}
        index = TextIndex({seq: start(text) for seq, text in last.items()})
        results: dict[int, tuple[str, Turn]] = {}
        for turn in self.turns:
            for message, text in zip(turn.messages, self.texts[turn.seq], strict=True):
                if turn.parent is None or message.get("role") != "tool" or len(text) < 12:
                    continue
                for root in index.found_in(shingles(text)):
                    named = self.root[turn.seq] < root < turn.seq and last[root] in text
                    if named and results.setdefault(root, (text, turn))[0] == text:
                        results[root] = text, turn
        return {root: turn for root, (_, turn) in results.items()}

    def named_in(self, branch: Branch) -> Iterator[Branch]:
        """Yield the roots whose first user message may be quoted in a branch's new messages."""
        short = (text for text in branch.new if len(text) < 12)
        runs = np.unique(np.concatenate([self._of_conversation(branch.text), *map(shingles, short)]))
        yield from (self.all[seq] for seq in sorted(self._users.found_in(runs)))

    @cached_property
    def _users(self) -> TextIndex:
        """An index of each root's first user message. Of roots that the rules can't tell apart, it has the first."""
        first: dict[Any, Branch] = {}
        for root in self._roots():
            calls = bool(root.turn.reply.get("tool_calls"))
            first.setdefault((root.user, root.system, len(root.users), calls, self.single(root)), root)
        return TextIndex({root.turn.seq: start(root.user) for root in first.values() if root.user})

    def _roots(self) -> Iterator[Branch]:
        return (root for root in self.all.values() if root.turn.parent is None)
