"""The three token paths to a trainer: as recorded, decoded and retokenized, or rendered again.

Each path is a function from a recorded session to a `Given`. The arms of the experiment differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.audit import pair_ids
from tokentape.audit import retokenized as through_text
from tokentape.chat import Renderer, Tokenizer
from tokentape.types import Logprobs, Message, TokenIds


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the model."""

    added_ids: TokenIds
    """What the context got before it: the first prompt, or the bridge from the turn before."""
    completion_ids: TokenIds
    """As sampled."""
    logprobs: Logprobs
    """Of `completion_ids`, as sampled."""
    message: Message
    """The question."""
    reply: Message
    """As parsed from `completion_ids`."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A session: its turns, and which questions were answered correctly."""

    turns: tuple[Turn, ...]
    right: tuple[bool, ...]

    @property
    def sampled(self) -> int:
        """How many tokens were sampled."""
        return sum(len(turn.completion_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Given:
    """The sequence that a trainer gets for a session."""

    prompt: int
    """Number of ids before the first trained one."""
    token_ids: TokenIds
    loss_mask: npt.NDArray[np.bool_]
    """True for tokens that the trainer treats as sampled by the policy, shape [tokens]."""
    logprobs: Logprobs
    """The sampler's logprobs, shape [tokens]: 0.0 for untrained tokens, NaN for text that was not sampled."""
    sampled: int
    """How many tokens were sampled."""
    other_ids: int = 0
    """Sampled tokens with other ids for the same text."""
    other_text: int = 0
    """Sampled tokens whose text the trainer does not get."""


Path: TypeAlias = Callable[[Renderer, Rollout], Given]


def recorded(renderer: Renderer, rollout: Rollout) -> Given:
    """Return the recorded ids with the sampler's logprobs."""
    pieces = []
    for turn in rollout.turns:
        pieces.append(_context(turn.added_ids))
        pieces.append(_Piece(turn.completion_ids, True, turn.logprobs, len(turn.completion_ids)))
    return _joined(pieces)


def retokenized(renderer: Renderer, rollout: Rollout) -> Given:
    """Decode and re-encode each completion; keep the tokens in between."""
    pieces = []
    for turn in rollout.turns:
        pieces.append(_context(turn.added_ids))
        again = through_text(renderer.tokenizer, turn.completion_ids)
        pieces.append(_completion(renderer.tokenizer, turn.completion_ids, turn.logprobs, again))
    return _joined(pieces)


def rerendered(renderer: Renderer, rollout: Rollout) -> Given:
    """Return the conversation as the renderer's template renders it, replies parsed and serialized like any message.

    Trained tokens are everything from after an assistant header to the end of that turn. Trainers that receive messages
    build their masks this way.
    """
    tokenizer = renderer.tokenizer
    ids = renderer.render([message for turn in rollout.turns for message in (turn.message, turn.reply)]).ids
    spans = assistant_spans(tokenizer, ids)
    if len(spans) != len(rollout.turns):
        raise RuntimeError(f"{len(rollout.turns)} turns were rendered as {len(spans)} assistant messages")
    pieces = []
    at = 0
    for turn, (start, end) in zip(rollout.turns, spans, strict=True):
        pieces.append(_context(ids[at:start]))
        pieces.append(_completion(tokenizer, turn.completion_ids, turn.logprobs, ids[start:end]))
        at = end
    return _joined(pieces)


PATHS: Mapping[str, Path] = {"recorded": recorded, "retokenized": retokenized, "rerendered": rerendered}
"""Token paths by name."""


def assistant_spans(tokenizer: Tokenizer, ids: TokenIds) -> list[tuple[int, int]]:
    """Return the spans of assistant messages in a ChatML rendering, from after the header to after `<|im_end|>`.

    If the line end of the header merged with the following text into one token, the token belongs to the message. The
    generation prompt at the end is not a message.
    """
    *header, line_end = tokenizer.encode_plain("<|im_start|>assistant\n")
    (stop,) = tokenizer.encode_plain("<|im_end|>")
    found = []
    for start in np.flatnonzero(ids == header[0]).tolist():
        begin = start + len(header)
        ends = np.flatnonzero(ids[begin:] == stop)
        if ids[start:begin].tolist() == header and len(ends):
            found.append((begin + int(ids[begin] == line_end), begin + int(ends[0]) + 1))
    return found


@dataclass(frozen=True, slots=True)
class _Piece:
    token_ids: TokenIds
    trained: bool
    logprobs: Logprobs
    sampled: int = 0
    other_ids: int = 0
    other_text: int = 0


def _context(ids: TokenIds) -> _Piece:
    return _Piece(ids, False, np.zeros(len(ids), np.float32))


def _completion(tokenizer: Tokenizer, sampled: TokenIds, logprobs: Logprobs, again: TokenIds) -> _Piece:
    """Return a completion that was re-encoded to `again`, with the sampler's logprobs.

    If the same text has other ids, the logprob of each stretch that both sides spell is divided evenly among its new
    tokens, because the sampler reported a probability for the stretch and not for these tokens.
    """
    found = pair_ids(sampled, again, tokenizer)
    kept = np.flatnonzero(found.partner >= 0)
    given = np.full(len(again), np.nan, np.float32)
    given[found.partner[kept]] = logprobs[kept]
    lost = len(sampled) - len(kept)
    if found.channel != "id drift":
        return _Piece(again, True, given, len(sampled), other_text=lost)
    # A stretch is a run of tokens without partners: several changes may be adjacent.
    edges = np.flatnonzero(np.diff(found.partner < 0, prepend=False, append=False))
    for first, after in edges.reshape(-1, 2).tolist():
        # What stands between the partners of the tokens around the stretch.
        start = found.partner[:first].max(initial=-1) + 1
        end = min(found.partner[after:][found.partner[after:] >= 0], default=len(again))
        given[start:end] = logprobs[first:after].sum() / (end - start)
    return _Piece(again, True, given, len(sampled), other_ids=lost)


def _joined(pieces: Sequence[_Piece]) -> Given:
    return Given(
        prompt=len(pieces[0].token_ids),
        token_ids=np.concatenate([piece.token_ids for piece in pieces]),
        loss_mask=np.concatenate([np.full(len(piece.token_ids), piece.trained) for piece in pieces]),
        logprobs=np.concatenate([piece.logprobs for piece in pieces]),
        sampled=sum(piece.sampled for piece in pieces),
        other_ids=sum(piece.other_ids for piece in pieces),
        other_text=sum(piece.other_text for piece in pieces),
    )
