"""The three ways in which a trainer gets its sequences: as recorded, decoded and retokenized, rendered again.

Each is a function from a recorded session to a `Given`. Nothing else of the experiment differs between its arms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape.audit.drift.rerender import with_objects
from tokentape.audit.tokendiff import pair_ids
from tokentape.audit.tokendiff import retokenized as through_text
from tokentape.chat import Renderer, Tokenizer
from tokentape.types import Logprobs, Setup, TokenIds, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Rollout:
    """One session as it was recorded."""

    trajectory: Trajectory
    path: tuple[Turn, ...]
    """Its turns, root first: the same branch with its messages."""
    setup: Setup
    right: bool
    """Whether every question was answered."""

    @property
    def sampled(self) -> int:
        """How many tokens were sampled."""
        return int(self.trajectory.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Given:
    """The sequence that a trainer gets of a session."""

    prompt: int
    """How many ids come before the first trained one."""
    token_ids: TokenIds
    loss_mask: npt.NDArray[np.bool_]
    """True where the trainer takes a token for the policy's, shape [tokens]."""
    logprobs: Logprobs
    """The sampler's, shape [tokens]: 0.0 where nothing is trained, NaN where the sampler sampled no such text."""
    sampled: int
    """How many tokens were sampled."""
    other_ids: int = 0
    """Of those, how many are spelt with other ids in the same text."""
    other_text: int = 0
    """Of those, how many are in no text that the trainer gets."""


Path: TypeAlias = Callable[[Renderer, Rollout], Given]


def recorded(renderer: Renderer, rollout: Rollout) -> Given:
    """The ids of the record and the sampler's logprobs: what was sampled, where it was sampled."""
    one = rollout.trajectory
    return Given(int(one.completion_starts[0]), one.token_ids, one.loss_mask, one.logprobs, int(one.loss_mask.sum()))


def retokenized(renderer: Renderer, rollout: Rollout) -> Given:
    """Each completion decoded to text and encoded again; what stands between completions stays."""
    one = rollout.trajectory
    pieces: list[_Piece] = []
    at = 0
    for start, end in zip(one.completion_starts.tolist(), one.completion_ends.tolist(), strict=True):
        pieces.append(_context(one.token_ids[at:start]))
        sampled = one.token_ids[start:end]
        again = through_text(renderer.tokenizer, sampled)
        pieces.append(_completion(renderer.tokenizer, sampled, one.logprobs[start:end], again))
        at = end
    return _joined(pieces)


def rerendered(renderer: Renderer, rollout: Rollout) -> Given:
    """The whole conversation as the chat template writes it: replies parsed, serialised and rendered like any other.

    Trained is what the template writes from behind an assistant header to the end of that turn. That is how trainers
    mask that get messages.
    """
    tokenizer = renderer.tokenizer
    messages = [message for turn in rollout.path for message in (*turn.messages, turn.reply)]
    ids = renderer.render([with_objects(message) for message in messages], rollout.setup).ids
    spans = assistant_spans(tokenizer, ids)
    if len(spans) != len(rollout.path):
        raise RuntimeError(f"{len(rollout.path)} turns were rendered as {len(spans)} assistant messages")
    pieces: list[_Piece] = []
    at = 0
    for turn, (start, end) in zip(rollout.path, spans, strict=True):
        pieces.append(_context(ids[at:start]))
        pieces.append(_completion(tokenizer, turn.completion_ids, turn.logprobs, ids[start:end]))
        at = end
    return _joined(pieces)


PATHS: Mapping[str, Path] = {"recorded": recorded, "retokenized": retokenized, "rerendered": rerendered}
"""The arms, by name."""


def assistant_spans(tokenizer: Tokenizer, ids: TokenIds) -> list[tuple[int, int]]:
    """Where assistant messages stand in a ChatML rendering: from behind the header to behind `<|im_end|>`.

    A token in which the header's line end has become one with what follows belongs to the message. The generation
    prompt at the end is no message.
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
    """A completion that became `again`, with the sampler's logprobs of it.

    Where the same text has other ids, the logprob of each stretch that both spell is shared out evenly over its new
    tokens: of the stretch, not of the token, the sampler has said how likely it was.
    """
    found = pair_ids(sampled, again, tokenizer)
    kept = np.flatnonzero(found.partner >= 0)
    given = np.full(len(again), np.nan, np.float32)
    given[found.partner[kept]] = logprobs[kept]
    lost = len(sampled) - len(kept)
    if found.channel != "id drift":
        return _Piece(again, True, given, len(sampled), other_text=lost)
    for change in found.changes:
        start, end = change.trainer_start, change.trainer_end
        given[start:end] = logprobs[change.start : change.end].sum() / (end - start)
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
