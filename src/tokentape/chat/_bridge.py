"""What to append after a sampled turn for new messages.

It is what the template writes after the turn, minus what the engine already sampled. The *suffix* is the rendering
after a sentinel that stands for the last thing the assistant said. It begins with how the template ends the turn; a
model that stopped by itself has sampled that part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokentape.chat._assistant_format import AssistantFormat, TurnClose
from tokentape.chat._call_syntax import OTHER_VALUE, QUESTION, common_prefix, common_suffix
from tokentape.chat._tokenizer import MARK, Tokenizer


@dataclass(frozen=True, slots=True)
class TurnSuffix:
    """A suffix cut where the turn ends."""

    text: str
    """Marked text from the control token on that ends the turn."""
    ends_turn: bool
    """Its first control token belongs to the assistant's turn; else it is the next message's header (GLM)."""
    before: str
    """What of the suffix came before `text`."""

    @property
    def repeated(self) -> int:
        """How often the control token that begins the text stands right before it too: there it closes a call."""
        mark, before = MARK.match(self.text), self.before
        while mark is not None and before.endswith(mark[0]):
            before = before.removesuffix(mark[0])
        return sum(1 for _ in MARK.finditer(self.before, len(before)))


def trim_to_turn_end(
    suffix: str,
    close: TurnClose,
    form: AssistantFormat,
    tokenizer: Tokenizer,
    eos_ids: frozenset[int],
    last_id: int | None = None,
    calls_end: Callable[[], str] = str,
) -> TurnSuffix:
    """Cut a suffix at the end of the assistant's turn.

    `close` is what the template writes after the same turn at the end of a conversation. What suffix and `close` share
    belongs to the turn. The model stops at the first end-of-sequence id there; without one, at the last special token,
    or the first of several in a row. What comes before it, such as a call's closing bracket, is the model's to write.
    The next message's header ends a turn only if its token does not stand within turns too. Where it does, only what
    was sampled says where the turn ended: `last_id`, the last id, or `calls_end`, the marked text of the last ids of a
    turn with calls.
    """
    shared = suffix[: common_prefix(suffix, close.last)]
    marks = [(match.start(), tokenizer.control_of_mark(match[0])) for match in MARK.finditer(shared)]
    ends = [position for position, control in marks if control.id in eos_ids][:1] or [
        position for position, control in marks if control.special and control.mark not in form.within_turns
    ]
    if ends:
        last = suffix[ends[-1] : ends[-1] + 2]
        position = min(position for position in ends if suffix.startswith(last, position))
        return _cut(suffix, position, ends_turn=True)
    spelled = form.content_close.last.strip()
    if spelled and spelled in shared:
        # This vocabulary has no token for the end of a turn, so it is text.
        position = shared.rindex(spelled)
        return _cut(suffix, position, ends_turn=True)
    header = MARK.search(suffix, len(shared))
    prompted = MARK.search(close.prompted, min(len(shared), common_prefix(suffix, close.prompted)))
    if header is not None and prompted is not None and header.start() == len(shared) and header[0] == prompted[0]:
        # What ends a conversation is another token than what ends a turn within one (gpt-oss).
        return _cut(suffix, len(shared), ends_turn=True)
    ends_both = header is not None and close.last.rstrip().endswith(header[0])
    if header is not None and ends_both and tokenizer.control_of_mark(header[0]).id in eos_ids:
        # The template writes something else before it where the conversation ends.
        return _cut(suffix, header.start(), ends_turn=True)
    within = header is not None and header[0] in form.within_turns
    sampled = next((position for position, control in reversed(marks) if control.id == last_id), 0) if within else 0
    if sampled:
        return _cut(suffix, sampled, ends_turn=True)
    if within or header is None or suffix[len(shared) : header.start()].strip():
        end = _end_within(form, tokenizer, eos_ids)
        if end is not None and end in suffix[len(shared) :]:
            # The template writes a turn otherwise where the conversation goes on. What it writes then is not repeated.
            return _cut(suffix, suffix.index(end, len(shared)), ends_turn=False)
        # Neither the turn nor the next message is framed by control tokens: all of the suffix is text. What closes a
        # call is the model's to write.
        position = _end_of_sampled(shared, calls_end()) if within else len(shared.rstrip())
        return _cut(suffix, position, ends_turn=False)
    return _cut(suffix, header.start(), ends_turn=False)


def _end_of_sampled(shared: str, sampled: str) -> int:
    """Return how much of what ends a turn was sampled: up to where it has most in common with the sampled text's end.

    White space says nothing: some tokenizers decode more of it than was encoded.
    """
    bare = "".join(sampled.split())
    ends = [end for end in range(1, len(shared) + 1) if not shared[end - 1].isspace()]
    common = [(common_suffix("".join(shared[:end].split()), bare), end) for end in ends]
    length, end = max(common, default=(0, 0))
    return end if length else 0


def _end_within(form: AssistantFormat, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> str | None:
    """Return the mark of the end-of-sequence token that ends turns within a conversation, whatever message follows."""
    before_next = form.content_suffix.partition(QUESTION["content"])[0], form.calls_suffix.partition(OTHER_VALUE)[0]
    ends = [[m for m in MARK.findall(text) if tokenizer.control_of_mark(m).id in eos_ids] for text in before_next]
    return ends[0][0] if ends[0] and ends[0][:1] == ends[1][:1] else None


def _cut(suffix: str, position: int, *, ends_turn: bool) -> TurnSuffix:
    return TurnSuffix(suffix[position:], ends_turn, suffix[:position])


def overlap(completion_ids: Sequence[int], suffix_ids: Sequence[int], repeated: int = 0) -> int:
    """Return the length of the longest suffix of the completion that is a prefix of the suffix.

    The first of the suffix's ids stands `repeated` times before it too, and is sampled there first.

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
    """Return how many characters at the end of a marked text also begin what follows, from a control token on."""
    starts = (match.start() for match in MARK.finditer(text))
    return next((len(text) - start for start in starts if following.startswith(text[start:])), 0)
