"""Find the turn from which each branch of a session came, and the role of each branch.

Edges are computed when a session is read; nothing here changes a record or a mask. Headers take precedence. Without
them, the texts of messages are compared, so the language of a prompt or summary does not matter. A rule takes a branch
and returns an edge to its origin, or None.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from tokentape._session.lineage_branches import WINDOW, Branch, Branches, Recorded, client_of
from tokentape._session.tree import Session
from tokentape.errors import InvalidRequest
from tokentape.types import LineageEdge, Message, Turn

ROLES = ("main", "subagent", "side_call")

_SUBAGENT = frozenset({"subagent", "workflow", "collab_spawn", "review"})
_SIDE_CALL = frozenset({"compaction", "compact", "auxiliary", "side_reply", "memory_consolidation"})
"""Values of Claude Code's header `x-claude-code-request-class` and of Codex's `x-openai-subagent`."""

_AT_ONCE = 0.005
"""Seconds. Turns closer than this are choices of one call. A retry comes later, because a commit comes first."""


def lineage(session: Session, others: Iterable[Recorded] = ()) -> list[LineageEdge]:
    """Return at most one edge per branch of `session`, in order of the branches' first turns.

    `others` are the sessions that headers name as parents, see `parent_sessions`.
    """
    one_branch = len({turn.parent for turn in session.turns}) == len(session.turns)
    if one_branch and not parent_sessions(session):
        return []
    branches = Branches(session, {other.info.session_id: other for other in others})
    edges = (next(filter(None, (rule(branches, branch) for rule in RULES)), None) for branch in branches.all.values())
    return [edge for edge in edges if edge is not None]


def parent_sessions(session: Session) -> set[str]:
    """Return the ids of other sessions that headers name as this session's parent."""
    parents = {client_of(turn).get("parent") for turn in session.turns if turn.parent is None}
    return {str(parent) for parent in parents if parent} - {session.info.session_id}


def roles(session: Session, edges: Iterable[LineageEdge]) -> dict[int, str]:
    """Return the agent of each turn, one of `ROLES`. Compactions, retries and edits inherit the agent."""
    by_turn = {edge.turn: edge for edge in edges}
    role_of: dict[int | None, str] = {}
    for turn in session.turns:
        edge = by_turn.get(turn.seq)
        if edge is not None and edge.kind in ROLES:
            role_of[turn.seq] = edge.kind
        else:
            role_of[turn.seq] = role_of.get(turn.parent if edge is None else edge.parent, "main")
    return {turn.seq: role_of[turn.seq] for turn in session.turns}


def check_roles(names: Iterable[str]) -> None:
    """Raise `InvalidRequest` unless each name is one of `ROLES`."""
    for name in names:
        if name not in ROLES:
            raise InvalidRequest(f"unknown role {name!r}; expected {', '.join(ROLES)}", "roles")


def edge(
    kind: str, branch: Branch, parent: int | None, evidence: str, confidence: float, session: str | None = None
) -> LineageEdge:
    """Return an edge to a turn, in the same session unless `session` is a different one."""
    return LineageEdge(kind, branch.turn.seq, session or branch.turn.session_id, parent, evidence, confidence)


def _retry(branches: Branches, branch: Branch) -> LineageEdge | None:
    """Return an edge if the branch repeats the request of a turn that was aborted, unread or unparseable."""
    turn, other = branch.turn, branches.same.get(branch.turn.seq)
    if other is None or turn.created_at - other.created_at < _AT_ONCE:
        return None
    if client_of(turn).get("retry"):
        return edge("retry", branch, other.seq, "header x-stainless-retry-count, same messages", 1.0)
    if other.finish_reason == "abort":
        why = f"was aborted ({other.abort_cause})"
    elif other.seq in branches.session.unread:
        why = "was not read by its client"
    elif other.sampling.get("parse_problem"):
        why = "could not be parsed"
    else:
        return None
    return edge("retry", branch, other.seq, f"same messages, and the reply before {why}", 0.95)


def _by_header(branches: Branches, branch: Branch) -> LineageEdge | None:
    """Return the origin that the client's headers state, or None."""
    client, turn = client_of(branch.turn), branch.turn
    if (parent := client.get("parent")) and parent != turn.session_id and turn.parent is None:
        return _from_parent_session(branches, branch, str(parent))
    last = next((other for other in branches.earlier(branch) if _agent(other) == _agent(turn)), None)
    if client.get("kind") in _SIDE_CALL:
        return _named_side_call(branches, branch, last)
    if turn.parent is not None:
        return None
    return _from_another_agent(branches, branch) if last is None else _named_compaction(branch, last)


def _from_parent_session(branches: Branches, branch: Branch, parent: str) -> LineageEdge:
    """Return the origin in the session that the harness names `parent`: this one or another of the record."""
    turn = branch.turn
    here = branches.by_client.get(parent, [])
    here = here[: bisect_left(here, turn.seq, key=lambda other: other.seq)]
    session = branches.others.get(parent)
    there = (other for other in reversed(session.turns if session else ()) if other.created_at <= turn.created_at)
    spawner, named = _spawner(branches, here[::-1] or there, branch)
    evidence = "header names the parent session" + (", whose tool call has this task" if named else "")
    role = "side_call" if client_of(turn).get("kind") in _SIDE_CALL else "subagent"
    return edge(role, branch, None if spawner is None else spawner.seq, evidence, 1.0, None if here else parent)


def _named_side_call(branches: Branches, branch: Branch, last: Turn | None) -> LineageEdge | None:
    """Return the origin of a side call: the agent's `last` turn, or the turn that its messages repeat."""
    before = branch.turn.parent
    if last is not None:
        over = _side_call(branches, branch)
        before = last.seq if over is None else over.parent
    kind = client_of(branch.turn).get("kind")
    return None if before is None else edge("side_call", branch, before, f"header says {kind}", 1.0)


def _from_another_agent(branches: Branches, branch: Branch) -> LineageEdge | None:
    """Return the origin of an agent's first branch, if its headers say that another agent started it."""
    client = client_of(branch.turn)
    is_subagent, parent = client.get("kind") in _SUBAGENT, client.get("parent_agent")
    if not is_subagent and not client.get("agent"):
        return None
    turns = [other for other in branches.earlier(branch) if _agent(other) == parent]
    if not parent and not is_subagent:
        # Codex's first agent also has an id.
        turns = [other for other in turns if client.get("session", "") == client_of(other).get("session")]
    if not turns:
        return None
    spawn, named = _spawner(branches, turns, branch)
    if not named or spawn is None:
        spawn = next((other for other in turns if branches.arguments(other)), turns[0])
    evidence = "header names another agent" + (", a tool call has its task" if named else "")
    return edge("subagent", branch, spawn.seq, evidence, 1.0)


def _named_compaction(branch: Branch, last: Turn) -> LineageEdge | None:
    """Return the origin `last` of a new context window of the same agent."""
    (old, number), (thread, now) = _window(last), _window(branch.turn)
    if client_of(branch.turn).get("compacted") or (old == thread and number < now):
        return edge("compaction", branch, last.seq, "header says that the context was compacted", 1.0)
    return None


def _window(turn: Turn) -> tuple[str, int]:
    """Return the thread id and number of a turn's context window, from Codex's header with the value THREAD:NUMBER."""
    thread, _, number = str(client_of(turn).get("window", "")).rpartition(":")
    return thread, int(number) if number.isdecimal() else 0


def _agent(turn: Turn) -> Any:
    return client_of(turn).get("agent")


def _spawner(branches: Branches, turns: Iterable[Turn], branch: Branch) -> tuple[Turn | None, bool]:
    """Return the newest of `turns` with a tool call that contains the branch's task, and True.

    Prefer a call with exactly the task to a call with text around the task or only a part of it. If no call contains
    the task, return the newest turn (or None) and False.
    """
    newest = list(islice(turns, WINDOW))
    part = None
    for turn in newest:
        arguments = branches.arguments(turn)
        if not branch.tasks.isdisjoint(arguments):
            return turn, True
        if part is None and any(
            (len(other) >= 24 and other in text) or (len(text) >= 24 and text in other)
            for other in arguments
            for text in branch.tasks
        ):
            part = turn
    return part or (newest[0] if newest else None), part is not None


def _subagent(branches: Branches, branch: Branch) -> LineageEdge | None:
    """Return an edge for a root that a different agent started.

    One of three signs is enough: a tool call contains the root's task; the root's last reply is a tool call's result;
    or, after a tool call, the history continues with a different system prompt and different tools (a handoff).
    """
    if branch.turn.parent is not None:
        return None
    returned = branches.returned.get(branch.turn.seq)
    spawn, named = _spawner(branches, branches.earlier(branch), branch)
    # A restarted run does not originate from the earlier run, even if that run passed its question to a tool.
    again = spawn is not None and _same_request(branches, branches.turns[branches.root[spawn.seq]], branch.turn)
    if spawn is not None and named and not again:
        # A request for a summary or title quotes a call's arguments with the surrounding history.
        exact = not branch.tasks.isdisjoint(branches.arguments(spawn))
        aside = None if exact or not branches.single(branch) else _over_history(branches, branch)[1]
        if aside is not None:
            return aside
        evidence = "a tool call has its task"
        if returned:
            return edge("subagent", branch, spawn.seq, f"{evidence}, whose result is its last reply", 0.98)
        parent = branches.branch_of(spawn.seq)
        other = parent.system != branch.system or spawn.setup != branch.turn.setup
        return edge("subagent", branch, spawn.seq, evidence, 0.9 if other else 0.6)
    if returned is not None and returned.parent is not None and returned.parent < branch.turn.seq:
        return edge("subagent", branch, returned.parent, "its last reply is the result of a tool call", 0.9)
    messages, keys = branch.turn.messages, branches.keys[branch.turn.seq]
    past = [key for key, message in zip(keys, messages, strict=False) if message.get("role") == "assistant"]
    handed = branches.reply_keys.get(past[-1]) if past else None
    if handed is not None and handed < branch.turn.seq and branches.turns[handed].setup != branch.turn.setup:
        parent = branches.branch_of(handed)
        if parent.system != branch.system and messages[-1].get("role") == "tool" and not branches.single(branch):
            return edge("subagent", branch, handed, "history goes on under another system prompt and tools", 0.8)
    return None


def _same_request(branches: Branches, turn: Turn, other: Turn) -> bool:
    return turn.setup == other.setup and branches.keys[turn.seq][:-1] == branches.keys[other.seq][:-1]


def _compaction(branches: Branches, branch: Branch) -> LineageEdge | None:
    """Return an edge for a branch with a shorter history and a new message that quotes a summary of an earlier branch.

    The summary is the reply of a recorded turn whose context contains the earlier branch.
    """
    turn = branch.turn
    keys = branches.keys[turn.seq]
    new_messages = zip(turn.messages, keys, branch.new, strict=False)
    text = " ".join(text for message, key, text in new_messages if _may_be_summary(branches, branch, message, key))
    for summary in branches.earlier(branch) if text else ():
        reply = branches.replies[summary.seq]
        if summary.finish_reason == "abort" or len(reply) < 40 or not branches.quoted(summary.seq, text):
            continue
        parent = _summarized(branches, summary)
        if parent is None or branches.length[turn.parent] >= branches.length[parent]:
            continue
        if len(branches.replies[parent]) >= 24 and branches.quoted(parent, branch.text):
            # The history itself is also quoted: this is a team, or a question about the history.
            continue
        if branches.branch_of(parent).system == branch.system or branches.turns[parent].setup == turn.setup:
            evidence = f"a message quotes the reply of turn {summary.seq}, which had the branch before"
            return edge("compaction", branch, parent, evidence, 0.95)
    return None


def _may_be_summary(branches: Branches, branch: Branch, message: Message, key: bytes) -> bool:
    if branches.first_sent[key] < branch.turn.seq and message.get("role") != "system":
        # An earlier branch already has the summary.
        return False
    seq = branches.reply_keys.get(key)
    if seq is None:
        # An assistant message that was not sampled is an edited reply: it quotes the original reply.
        return message.get("role") not in ("tool", "assistant")
    # An assistant message in the history is a summary only if a call outside the branch wrote it.
    other = branches.branch_of(seq)
    return branches.single(other) and not branches.similar(other.system, branch.system)


def _summarized(branches: Branches, summary: Turn) -> int | None:
    """Return the newest turn that a summary covers: its parent, or a turn whose reply its prompt contains."""
    if summary.parent is not None:
        return summary.parent
    root = branches.all[summary.seq]
    return next((turn.seq for turn in branches.earlier(root) if _has_reply(branches, root, turn)), None)


def _has_reply(branches: Branches, root: Branch, turn: Turn) -> bool:
    """Return whether a message in the root equals or quotes the reply of `turn`."""
    if branches.keys[turn.seq][-1] in root.keys:
        return True
    return len(branches.replies[turn.seq]) >= 24 and branches.quoted(turn.seq, root.text)


def _edit(branches: Branches, branch: Branch) -> LineageEdge | None:
    """Return an edge for a branch that changes an earlier branch's history: an edit or a compaction.

    It is a compaction if fewer new messages replace at least three old ones.
    """
    turn = branch.turn
    keys = branches.keys[turn.seq][:-1]
    places = [index for index, key in enumerate(keys) if branches.reply_keys.get(key, turn.seq) < turn.seq]
    if not places and turn.parent is None:
        return _changed_reply(branches, branch)
    if not places:
        return _beside(branches, branch, branches.children[turn.parent], turn.parent)
    last, end = branches.reply_keys[keys[places[-1]]], places[-1] + 1
    # Earlier branches may have the same edited history, or begin with the same summary. A branch whose own reply ends
    # this history is not beside this branch but before it.
    siblings = [one for one in branches.earlier(branch) if (one.parent, one.setup) == (turn.parent, turn.setup)]
    same = [one for one in reversed(siblings) if branches.keys[one.seq][:-1][:end] == keys[:end]]
    if beside := _beside(branches, branch, same, last):
        return beside
    other = branches.branch_of(last)
    changed = other.system != branch.system and not branches.similar(other.system, branch.system)
    if branches.single(branch) and (changed or other.turn.setup != turn.setup):
        return None
    path, own = branches.path_keys(last), set(branches.path_keys(turn.seq)[:-1])
    removed = [key for key in path if key not in own]
    path_keys = set(path)
    added = [key for key in keys[: places[-1]] if key not in path_keys]
    if len(removed) >= 3 and 0 < len(added) < len(removed) and other.system == branch.system:
        evidence = f"{len(added)} new messages stand for {len(removed)} of the branch before"
        return edge("compaction", branch, last, evidence, 0.7)
    share = 1 - len(removed) / len(path)
    evidence = f"{share:.0%} of the messages of the branch before, the rest changed"
    return edge("edit", branch, last, evidence, round(0.6 + 0.35 * share, 2))


def _changed_reply(branches: Branches, branch: Branch) -> LineageEdge | None:
    """Return an edge for a root that repeats an earlier root's messages and continues with a different reply."""
    keys = branches.keys[branch.turn.seq][:-1]
    for other in branches.earlier(branch):
        other_keys = branches.keys[other.seq][:-1]
        same = other.parent is None and other.setup == branch.turn.setup and keys[: len(other_keys)] == other_keys
        if same and len(keys) > len(other_keys) and branch.turn.messages[len(other_keys)].get("role") == "assistant":
            return edge("edit", branch, other.seq, "the reply to its first messages was changed", 0.9)
    return None


def _beside(branches: Branches, branch: Branch, siblings: Sequence[Turn], last: int | None) -> LineageEdge | None:
    """Return an edge for a branch with the same history as earlier branches: a side call, or an edit of the newest.

    `siblings` are the first turns of all branches with this history, and `last` is the newest turn in it.
    """
    turn = branch.turn
    index = bisect_left(siblings, turn.seq, key=lambda sibling: sibling.seq)
    beside = [
        other for other in siblings[max(index - WINDOW, 0) : index] if client_of(other).get("kind") not in _SIDE_CALL
    ]
    if not beside or turn.seq in branches.same:
        return None
    if branches.single(branch) and any(branches.last[other.seq] > turn.seq for other in beside):
        return edge("side_call", branch, last, "one reply, and the branch beside it goes on", 0.8)
    if branches.single(branch) and _is_summary(branches, turn):
        return edge("side_call", branch, last, "one reply, and the next root quotes it", 0.9)
    return edge("edit", branch, beside[-1].seq, "other messages after the same history", 0.9)


def _is_summary(branches: Branches, turn: Turn) -> bool:
    """Return whether the next root quotes a turn's reply and has the same system prompt or tools."""
    roots = (candidate for candidate in branches.turns[turn.seq + 1 : turn.seq + WINDOW] if candidate.parent is None)
    root = next(roots, None)
    return (
        root is not None
        and (root.setup == turn.setup or branches.all[root.seq].system == branches.branch_of(turn.seq).system)
        and len(branches.replies[turn.seq]) >= 40
        and branches.quoted(turn.seq, branches.all[root.seq].text)
    )


def _side_call(branches: Branches, branch: Branch) -> LineageEdge | None:
    """Return an edge for a single turn with a different branch's messages but a different system prompt or tools."""
    turn = branch.turn
    if turn.parent is not None or not branches.single(branch):
        return None
    over, aside = _over_history(branches, branch)
    if over or any(message.get("role") == "assistant" for message in turn.messages):
        return aside
    for root in branches.named_in(branch):
        if root.turn.seq in branches.heard.get(turn.seq, ()):
            # Both are team members, and this one replied first.
            continue
        longer = not branches.single(root) or (root.turn.reply.get("tool_calls") and not turn.reply.get("tool_calls"))
        # The branch has the root's first message unchanged, and another message that asks something about it.
        longer = longer or (root.user in branch.users and len(branch.users) > len(root.users))
        # A team member may have only one turn.
        longer = longer or root.turn.seq in branches.heard
        named = root.user in (branch.text if len(root.user) >= 12 else branch.users)
        if longer and named and root.system != branch.system and not branches.similar(root.system, branch.system):
            evidence = "one reply over the first user message of another branch"
            return edge("side_call", branch, root.turn.seq, evidence, 0.85)
    return None


def _over_history(branches: Branches, branch: Branch) -> tuple[bool, LineageEdge | None]:
    """Return whether a branch contains a different branch's history, and its edge unless its reply is forwarded."""
    for turn in branches.earlier(branch):
        other = branches.branch_of(turn.seq)
        same = other.system == branch.system and turn.setup == branch.turn.setup
        if not same and _has_reply(branches, branch, turn):
            if branch.turn.seq in branches.heard.get(turn.seq, ()) or _sent_on(branches, branch, turn):
                return True, None
            return True, edge("side_call", branch, turn.seq, "one reply over the history of another branch", 0.85)
    return False, None


def _sent_on(branches: Branches, branch: Branch, over: Turn) -> bool:
    """Return whether a later turn in a different branch got the reply of this branch's first turn in a message.

    A root must also contain the reply of `over`, from the history: otherwise the forwarded reply may be a summary.
    """
    reply = branches.replies[branch.turn.seq]
    return len(reply) >= 12 and any(
        reply in text
        for turn in branches.turns[branch.turn.seq + 1 : branch.turn.seq + WINDOW]
        if turn.parent is not None or _has_reply(branches, branches.all[turn.seq], over)
        for text in branches.texts[turn.seq]
    )


def _member(branches: Branches, branch: Branch) -> LineageEdge | None:
    """Return an edge for a team member: a new system prompt, and an earlier branch's reply as a user message."""
    if branch.turn.parent is not None:
        return None
    messages = zip(branch.turn.messages, branch.new, strict=True)
    texts = {text for message, text in messages if message.get("role") in ("user", "tool") and len(text) >= 12}
    for turn in branches.earlier(branch):
        reply = branches.replies[turn.seq]
        if (
            len(reply) >= 12
            and branches.branch_of(turn.seq).system != branch.system
            and any(reply in text for text in texts)
        ):
            return edge("subagent", branch, turn.seq, "another agent's reply is its user message", 0.7)
    return None


def _similar(branches: Branches, branch: Branch) -> LineageEdge | None:
    """Return an edge for a root whose system prompt or first user message was edited."""
    turn = branch.turn
    if turn.parent is not None:
        return None
    for candidate in branches.earlier(branch):
        other = branches.branch_of(candidate.seq)
        if candidate.setup != turn.setup or other.turn.seq == turn.seq:
            continue
        same_user, same_system = other.user == branch.user, other.system == branch.system
        if same_user != same_system and bool(branch.user):
            changed = (other.system, branch.system) if same_user else (other.user, branch.user)
            if branches.similar(*changed):
                what = "system prompt" if same_user else "first user message"
                return edge("edit", branch, other.turn.seq, f"the {what} was edited", 0.6)
    return None


RULES = (_retry, _by_header, _compaction, _subagent, _edit, _side_call, _member, _similar)
"""The rules in order of precedence: the first edge that a rule returns is used."""
