"""Replies as a model would sample them, and what belongs after them, by the template's own rendering."""

from __future__ import annotations

import os.path
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tests.generator.conversations import Conversation, words_in
from tests.generator.oracle import Reference, end_of_reply


@dataclass(frozen=True)
class SampledTurn:
    """A sampled turn."""

    text: str
    ids: list[int]
    stop: str
    """The stop token that it ends with; empty if it has none."""
    own: bool
    """Whether the template itself writes it after the prompt."""
    halted: bool
    """The template writes a stop token within the turn that the folder does not declare."""
    after_word: str
    """What of the text follows the reply's last word, the stop token included."""
    turn_end: int
    """Where in the rendering of history and reply the turn ends, before its stop token."""
    full_end: int
    """Where in the whole rendering the reply's last word ends."""


def sampled_turn(
    reference: Reference,
    stop_ids: AbstractSet[int],
    conversation: Conversation,
    prompt: str,
    with_reply: str,
    full: str,
) -> SampledTurn | None:
    """The reply as the template writes it after the prompt, up to the first of the product's stop tokens.

    Where the prompt is not what stands before turns later on, the model writes what it has in common with the turn.
    None if the template does not write the reply, or nothing can be cut out.
    """
    word_end, full_word_end = (
        end_of_reply(with_reply, conversation.reply),
        end_of_reply(full, conversation.reply, conversation.new),
    )
    if word_end is None or full_word_end is None:
        return None
    own = with_reply.startswith(prompt)
    start = len(prompt) if own else len(os.path.commonprefix([prompt, with_reply]))
    if not own:
        before = words_in(conversation.history)
        if start < max((prompt.rfind(word) for word in before), default=0):
            if conversation.reply.get("tool_calls"):
                return None
            start = with_reply.rfind((conversation.reply["content"] or "").strip(), 0, word_end)
            if start < 0:
                return None
        cut = reference.first_control(with_reply, max(start - 40, 0))
        while cut is not None and cut[0] < start:
            if start < cut[0] + len(cut[1]):
                start = cut[0]
                break
            cut = reference.first_control(with_reply, cut[0] + len(cut[1]))
    stops = sorted(content for token_id in stop_ids if (content := reference.content_of(token_id)))
    within = [stop for stop in stops if stop in with_reply[start:word_end]]
    if within:
        declared = {reference.content_of(token_id) for token_id in reference.eos_ids}
        if not own or any(stop in declared for stop in within):
            return None
        first = min(within, key=lambda stop: with_reply.find(stop, start))
        text = with_reply[start:word_end]
        return SampledTurn(text, [], first, own, True, "", word_end, full_word_end)
    ended = _first(with_reply, stops, word_end)
    following = _first(full, stops, full_word_end)
    if ended is not None:
        at, stop = ended
        after = with_reply[word_end : at + len(stop)]
        turn_end = at
    elif following is not None and not any(
        w in full[full_word_end : following[0]] for w in words_in(list(conversation.new))
    ):
        # No separate token ends the turn: the model stops at the header of the next message.
        at, stop = following
        after = full[full_word_end : at + len(stop)]
        turn_end = word_end
    else:
        # Nothing ends the turn. What follows a call's last word in any case is the model's to write. What follows
        # content is not, but for the white space that the content ends with.
        after = os.path.commonprefix([with_reply[word_end:], full[full_word_end:]])
        if not conversation.reply.get("tool_calls"):
            after = os.path.commonprefix([after, _kept_space(reference, conversation, with_reply)])
        stop, turn_end = "", word_end
    text = with_reply[start:word_end] + after
    ids = reference.encode(text).ids
    return SampledTurn(text, ids, stop, own, False, after, turn_end, full_word_end)


def _kept_space(reference: Reference, conversation: Conversation, with_reply: str) -> str:
    """The white space at the end of a reply's content, if the template does not cut it off."""
    content: str = conversation.reply["content"]
    bare = {**conversation.reply, "content": content.rstrip()}
    cut_off = reference.render([*conversation.history, bare], conversation.tools, generate=False) == with_reply
    return "" if cut_off else content[len(content.rstrip()) :]


def _first(text: str, tokens: list[str], at: int) -> tuple[int, str] | None:
    found = [(where, token) for token in tokens if (where := text.find(token, at)) >= 0]
    return min(found) if found else None


def expected_tail(
    reference: Reference, conversation: Conversation, full: str, turn: SampledTurn, end_tokens: frozenset[str]
) -> list[tuple[str, list[int] | None]] | None:
    """What may follow the sampled turn: text, and ids where they are certain. None if nothing can be said.

    Where the turn ended with another token than the template writes there, what follows depends on whether that one
    ends turns or begins messages. `end_tokens` says which do; both are allowed if it is empty.
    """
    tail = full[turn.full_end :]
    limit = min((at for word in words_in(list(conversation.new)) if (at := tail.find(word)) >= 0), default=len(tail))
    if tail.startswith(turn.after_word):
        return [_with_ids(reference, full, turn.full_end + len(turn.after_word))]
    if not turn.stop:
        return None
    same = tail.find(turn.stop, 0, limit)
    if same >= 0:
        return [_with_ids(reference, full, turn.full_end + same + len(turn.stop))]
    before_stop = turn.after_word[: len(turn.after_word) - len(turn.stop)]
    # What ends the turn may be written differently where it is the last one, but only after the end of its calls.
    shared = len(os.path.commonprefix([before_stop, tail]))
    other = reference.first_control(tail)
    while other is not None and other[0] + len(other[1]) <= shared:
        other = reference.first_control(tail, other[0] + len(other[1]))
    if other is None or other[0] > limit:
        return None
    where, token = turn.full_end + other[0], other[1]
    after, from_it = (_with_ids(reference, full, at) for at in (where + len(token), where))
    if not end_tokens:
        return [after, from_it]
    return [after if token in end_tokens else from_it]


def _with_ids(reference: Reference, full: str, at: int) -> tuple[str, list[int] | None]:
    """The text from there on, with its ids in the whole, if they begin at a control token or after one."""
    encoded = reference.encode(full)
    index = encoded.boundary(at)
    # Runs of spaces and line breaks may be tokens too; those are text, which may merge with the text before.
    ends_control = any(full.endswith(token, 0, at) for token in reference.controls)
    begins_control = any(full.startswith(token, at) for token in reference.controls)
    if index is None or not (ends_control or begins_control):
        rstrip = next((n for n, (s, e) in enumerate(encoded.spans) if s < at < e), None)
        content = None if rstrip is None else reference.content_of(encoded.ids[rstrip])
        if rstrip is None or content is None or not reference.added[content]["rstrip"]:
            return full[at:], None
        index = rstrip + 1
    return full[at:], encoded.ids[index:]
