"""Compute the bridge: the ids to append after a sampled turn for new messages.

A bridge is what the template writes after the turn, minus what the engine already sampled. The *suffix* is the rendered
text after a sentinel in place of the assistant's last text. It begins with the text that ends the turn. A model that
stopped by itself has already sampled that part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from tokentape.chat._assistant_format import AssistantFormat, TurnClose
from tokentape.chat._call_syntax import OTHER_VALUE, QUESTION, common_prefix, common_suffix
from tokentape.chat._tokenizer import MARK, Tokenizer


class TurnSuffix(Struct, frozen=True):
    """A suffix, split where the turn ends."""

    text: str
    """The marked text from where the turn ends, usually at a control token."""
    ends_turn: bool
    """Whether `text` begins with the end of the assistant's turn, not with the next message's header (GLM)."""
    before: str
    """The part of the suffix before `text`."""

    @property
    def repeated(self) -> int:
        """How often `text`'s first control token also occurs directly before it, where it closes a call."""
        mark, before = MARK.match(self.text), self.before
        while mark is not None and before.endswith(mark[0]):
            before = before.removesuffix(mark[0])
        return sum(1 for _ in MARK.finditer(self.before, len(before)))


def trim_to_turn_end(
    suffix: str,
    close: TurnClose,
    form: AssistantFormat,
    tokenizer: Tokenizer,
    last_id: int | None = None,
    calls_end: Callable[[], str] = str,
) -> TurnSuffix:
    """Split a suffix at the end of the assistant's turn.

    `close` is what the template writes after the same turn at the end of a conversation. The common beginning of the
    suffix and `close` belongs to the turn. The model stops there at the first end-of-sequence id, else at the last
    special token (the first if it is repeated). Text before that, such as a call's closing bracket, is left to the
    model. The next message's header ends a turn only if its token does not also occur within turns; a turn with
    `last_id` equal to this token ended there. If it does, only the sampled ids show where the turn ended: `last_id`, or
    `calls_end`, the marked text of a turn's last ids.
    """
    eos_ids, shared = tokenizer.eos_ids, suffix[: common_prefix(suffix, close.last)]
    marks = [(match.start(), tokenizer.control_of_mark(match[0])) for match in MARK.finditer(shared)]
    ends = [position for position, control in marks if control.id in eos_ids][:1] or [
        position for position, control in marks if control.special and control.mark not in form.within_turns
    ]
    if ends:
        last = suffix[ends[-1] : ends[-1] + 2]
        position = min(position for position in ends if suffix.startswith(last, position))
        return _cut(suffix, position, ends_turn=True)
    header = MARK.search(suffix, len(shared))
    within = header is not None and header[0] in form.within_turns
    if header is not None and not within and tokenizer.control_of_mark(header[0]).id == last_id:
        # The model has sampled the next header. What it sampled before stays, also where the template writes other ids.
        return _cut(suffix, header.start(), ends_turn=False)
    spelled = form.content_close.last.strip()
    if spelled and spelled in shared:
        # This vocabulary has no token that ends a turn, so the end is text.
        position = len(shared[: shared.rindex(spelled)].rstrip())
        return _cut(suffix, position, ends_turn=True)
    prompted = MARK.search(close.prompted, min(len(shared), common_prefix(suffix, close.prompted)))
    if header is not None and prompted is not None and header.start() == len(shared) and header[0] == prompted[0]:
        # The token that ends a conversation differs from the token that ends a turn within one (gpt-oss).
        return _cut(suffix, len(shared), ends_turn=True)
    ends_both = header is not None and close.last.rstrip().endswith(header[0])
    if header is not None and ends_both and tokenizer.control_of_mark(header[0]).id in eos_ids:
        # At the end of a conversation, the template writes a different text before this token.
        return _cut(suffix, header.start(), ends_turn=True)
    sampled = next((position for position, control in reversed(marks) if control.id == last_id), 0) if within else 0
    if sampled:
        return _cut(suffix, sampled, ends_turn=True)
    if within or header is None or suffix[len(shared) : header.start()].strip():
        end = _end_within(form, tokenizer)
        if end is not None and end in suffix[len(shared) :]:
            # The template writes a turn differently if the conversation goes on. That text is not repeated.
            return _cut(suffix, suffix.index(end, len(shared)), ends_turn=False)
        # No control token ends the turn or opens the next message: the whole suffix is text. Text that closes a call
        # is left to the model.
        position = _end_of_sampled(shared, calls_end()) if within else len(shared.rstrip())
        return _cut(suffix, position, ends_turn=False)
    return _cut(suffix, header.start(), ends_turn=False)


def _end_of_sampled(shared: str, sampled: str) -> int:
    """Return how many characters of `shared`, the end of a turn, were sampled: the prefix that best matches `sampled`.

    White space is not compared because some tokenizers decode more of it than was encoded.
    """
    bare = "".join(sampled.split())
    ends = [end for end in range(1, len(shared) + 1) if not shared[end - 1].isspace()]
    common = [(common_suffix("".join(shared[:end].split()), bare), end) for end in ends]
    length, end = max(common, default=(0, 0))
    return end if length else 0


def _end_within(form: AssistantFormat, tokenizer: Tokenizer) -> str | None:
    """Return the mark of the end-of-sequence token after a turn if it is the same before questions and tool results."""
    before_next = form.content_suffix.partition(QUESTION["content"])[0], form.calls_suffix.partition(OTHER_VALUE)[0]
    stops = tokenizer.marks(tokenizer.eos_ids)
    ends = [[mark for mark in MARK.findall(text) if mark in stops] for text in before_next]
    return ends[0][0] if ends[0] and ends[0][:1] == ends[1][:1] else None


def _cut(suffix: str, position: int, *, ends_turn: bool) -> TurnSuffix:
    return TurnSuffix(suffix[position:], ends_turn, suffix[:position])


def overlap(completion_ids: Sequence[int], suffix_ids: Sequence[int], repeated: int = 0) -> int:
    """Return the length of the longest suffix of the completion that is a prefix of the suffix.

    The suffix's first id also occurs `repeated` times before the suffix; the model samples those occurrences first.

    >>> overlap([5, 9, 2], [2, 7, 8]), overlap([5, 9, 2, 7], [2, 7, 8]), overlap([5, 9], [2, 7, 8])
    (1, 2, 0)
    >>> overlap([5, 2], [2, 7], repeated=1), overlap([5, 2, 2], [2, 7], repeated=1)
    (0, 1)
    """
    whole = list(suffix_ids[:1]) * repeated + list(suffix_ids)
    for n in range(min(len(completion_ids), len(whole)), 0, -1):
        if whole[n - 1] == completion_ids[-1] and list(completion_ids[-n:]) == whole[:n]:
            return max(n - repeated, 0)
    return 0


def repeated_end(text: str, following: str) -> int:
    """Return the length of the end of `text`, from a control token on, with which `following` begins."""
    starts = (match.start() for match in MARK.finditer(text))
    return next((len(text) - start for start in starts if following.startswith(text[start:])), 0)
