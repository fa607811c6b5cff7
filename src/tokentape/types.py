"""Data types shared by the packages of Tokentape.

A *turn* is one engine call, a *session* is one agent's tree of turns, and a *trajectory* is one root-to-leaf path
flattened to arrays.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cached_property
from html import escape
from sys import intern
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tokentape._canonical import canonical_json, digest_of, json_in_order

TokenIds: TypeAlias = npt.NDArray[np.int32]
"""Token ids, shape [tokens]."""

Logprobs: TypeAlias = npt.NDArray[np.float32]
"""Natural-log probabilities, shape [tokens]."""

TokenValues: TypeAlias = npt.NDArray[np.float32]
"""One number per token, shape [tokens]."""

Codes: TypeAlias = npt.NDArray[np.uint8]
"""`Provenance` codes, shape [tokens]."""

Message: TypeAlias = Mapping[str, Any]
"""An OpenAI-style message: role, content, reasoning_content, tool_calls, tool_call_id, name."""

Tool: TypeAlias = Mapping[str, Any]
"""An OpenAI-style tool: {"type": "function", "function": {name, description, parameters}}."""

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
"""Why sampling ended: a stop id or stop string, the token budget, or the call was cancelled."""


class Provenance(IntEnum):
    """The writer of a token in a trajectory. Stored as uint8; the numbers are part of the file format."""

    SAMPLED = 1
    """Returned by the engine. The only tokens that carry loss."""
    TEMPLATE = 2
    """Written by the chat template: headers, separators, tool schemas, the generation prompt."""
    SYSTEM = 3
    USER = 4
    TOOL = 5
    ASSISTANT = 6
    """Assistant text that came from the caller and was not sampled in this session."""
    CLOSE = 7
    """Added by the gateway to end a turn that the model did not end."""
    MEDIA = 8
    """A placeholder for part of an image."""


@dataclass(frozen=True)
class Setup:
    """The inputs of rendering other than the messages. Two turns with different setups share no context.

    `Renderer.setup` creates it. `fingerprint` identifies the tokenizer files, the template and the library versions.
    `date` is the date that `strftime_now` returns to the template, fixed for the session. Tools and kwargs are copied,
    so later changes don't affect the setup. Raises `InvalidRequest` if they are not JSON.
    """

    tools: tuple[Tool, ...]
    template_kwargs: Mapping[str, Any]
    date: str
    fingerprint: str

    def __post_init__(self) -> None:
        tools, kwargs = json.loads(json_in_order([list(self.tools), self.template_kwargs]))
        object.__setattr__(self, "tools", tuple(tools))
        object.__setattr__(self, "template_kwargs", kwargs)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the fields, ignoring the order of their keys. Used as a key in the store."""
        fields = {
            "tools": list(self.tools),
            "template_kwargs": self.template_kwargs,
            "date": self.date,
            "fingerprint": self.fingerprint,
        }
        # Turns kept in memory share one string.
        return intern(digest_of(b"tokentape setup 1", canonical_json(fields).encode("ascii")))

    @cached_property
    def key(self) -> str:
        """Hex SHA-256 of the fields and the order of their keys, which a template may print. Used as a cache key."""
        return setup_key(self.tools, self.template_kwargs, self.date, self.fingerprint)


def setup_key(tools: Sequence[Tool], template_kwargs: Mapping[str, Any], date: str, fingerprint: str) -> str:
    """Return the `key` of a `Setup` with these fields. Raises `InvalidRequest` if JSON can't represent them."""
    return digest_of(json_in_order([list(tools), template_kwargs, date, fingerprint]).encode("ascii"))


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One agent's session, without its turns."""

    session_id: str
    created_at: float
    """Unix seconds."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    owner: str = ""
    """Name of the API key that the session belongs to; empty if the gateway has no keys."""


@dataclass(frozen=True, slots=True)
class TokenDistribution:
    """A distribution over the next token: the changes made to the model's logits, in the order of these fields.

    None means not known. Two equal objects without None are the same distribution.
    """

    penalties: bool | None = None
    """Presence, frequency or repetition penalties, or stop tokens excluded by `min_tokens`."""
    temperature: float | None = None
    """Divisor of the logits. 1.0 has no effect; 0.0 means greedy, so the likeliest token has probability 1."""
    truncation: bool | None = None
    """Only the likeliest tokens were kept, by top-k, top-p or min-p, and their probabilities renormalized."""
    grammar: bool | None = None
    """Tokens that a grammar or schema forbids were excluded."""

    def __post_init__(self) -> None:
        if self.temperature is not None:
            # Digests need one spelling of each number.
            object.__setattr__(self, "temperature", float(self.temperature) + 0.0)

    def same_as(self, other: TokenDistribution) -> bool | None:
        """Return whether both are the same distribution; None if that is not known."""
        pairs = [(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        if any(ours != theirs for ours, theirs in pairs if ours is not None and theirs is not None):
            return False
        return None if any(None in pair for pair in pairs) else True


@dataclass(frozen=True, slots=True)
class Resume:
    """The point of a completion where a further engine call continued it after an abort."""

    start: int
    """Offset in the completion of the first token of the continuing call."""
    cause: str
    """Why the previous call was aborted: `engine_abort`, or `paused` if the gateway was paused."""
    engine: str | None = None
    """The engine of the continuing call, as in `Turn.engine`; None if the engine did not change."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A recorded engine call. Its context is its parent's context + completion + `added_ids`."""

    session_id: str
    seq: int
    """Position in the session's order of commits, from 0."""
    parent: int | None
    """`seq` of the parent turn; None for a turn that starts a branch from nothing."""
    setup: str
    """Digest of the `Setup` that the turn was rendered with."""
    messages: tuple[Message, ...]
    """The new messages of the request, which the parent's history does not contain."""
    reply: Message
    """The assistant message parsed from the completion, as sent to the client."""
    added_ids: TokenIds
    """The bridge (ids appended after the parent's completion), or for a root turn the whole rendered prompt."""
    added_provenance: Codes
    completion_ids: TokenIds
    """Exactly what the engine returned."""
    logprobs: Logprobs
    """One per completion id."""
    finish_reason: FinishReason
    """Why sampling ended; `stop` also if clients see `tool_calls`."""
    stop: int | str | None
    """The stop id or stop string that ended the completion, if one did."""
    fork: str | None
    """Why this turn does not continue the session's newest branch; None if it continues it."""
    sampling: Mapping[str, Any]
    """Sampling parameters as sent to the engine, and notes about the call.

    - `asked`: the caller's values that a pin overrode.
    - `client`: information about the call from headers of the agent harness.
    - `supports`: for truncated sampling, whether the kept ids are recorded for `all`, `some` or `none` of the tokens.
    - `aborted`, {cause, outcome, why}: the engine aborted the completion, and it was not continued.
    - `server_limit`: the number of tokens at which the engine ended the completion with `length`, although `max_tokens`
      and the context allow more.
    - `resume_seeds`: the seeds of the calls that continued the completion.
    - `parse_problem`: why the completion was not parsed.
    - `drift`, {turn, token}: for a fork with this cause, the turn that the server should have continued, and the first
      token where the server's context differs.
    """
    engine: str
    """Engine name, version and logprobs mode, for example `transformers 5.23.0 raw_logprobs`."""
    weight_version: str
    """Version of the weights that sampled the first token; `unknown` if the engine does not report it."""
    created_at: float
    """Unix seconds."""
    digest: str
    """Hex SHA-256 over this turn and its parent's digest: the hash chain of the branch."""
    weight_changes: tuple[tuple[int, str], ...] = ()
    """Weight changes during sampling: the offset of the first token of the new version, and the version."""
    abort_cause: str | None = None
    """With finish_reason `abort`, why: `client_left`, `shutdown`, `paused`, `engine_abort`, `answered_elsewhere` (by
    another gateway), or the code of the engine's error."""
    sampled_from: TokenDistribution | None = None
    """The distribution that the completion was sampled from; None in records that predate this field."""
    logprobs_of: TokenDistribution | None = None
    """The distribution that `logprobs` belong to; None if not known."""
    resumes: tuple[Resume, ...] = ()
    """Where other engine calls continued the completion, in order."""
    adapter: str | None = None
    """Name of the LoRA adapter that sampled the completion; None for the model without an adapter."""


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """The turns that answered a call, kept so that a retry of the call gets the same reply."""

    session_id: str
    reply_id: str
    """Random id of the reply, which clients see."""
    turns: tuple[int, ...]
    """`seq` of the turn of each choice."""
    key: str | None
    """The call's Idempotency-Key."""
    body_digest: str
    """Hex SHA-256 of path and body."""
    created_at: float
    """Unix seconds."""
    top_logprobs: tuple[tuple[tuple[tuple[int, float], ...], ...], ...] = ()
    """By choice and token, the reported alternatives, if they were requested."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward for a session, for one turn's action, or for the whole path that ends with a leaf (last turn).

    Without `turn` and `leaf` it is the session's reward. A later reward for the same target replaces earlier ones.
    """

    session_id: str
    turn: int | None
    """The turn with the rewarded action."""
    value: float
    created_at: float
    """Unix seconds."""
    leaf: int | None = None
    """The last turn of the rewarded path; only if `turn` is None."""


@dataclass(frozen=True, slots=True)
class Event:
    """A fact about a session that was found after its turns were recorded. Events are appended, never changed."""

    session_id: str
    turn: int | None
    """The turn that the event is about; None for the session."""
    kind: str
    body: Mapping[str, Any]
    """JSON; its fields depend on `kind`."""
    created_at: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class TurnColumn:
    """A named number per token of one turn, for example advantages. A later column replaces one with the same name."""

    session_id: str
    turn: int
    name: str
    values: TokenValues
    """One per completion id, or one per added id and completion id."""
    created_at: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class TurnPayload:
    """A named array from an engine with one row per token of a turn, for example the experts of each token."""

    session_id: str
    turn: int
    name: str
    start: int
    """Index of the first row's token in the turn's added and completion ids. -1 is the parent's last id: an engine
    returns no row for the last id that it samples; only the call that continues the turn returns it."""
    rows: npt.NDArray[Any]
    """Shape [tokens, ...] with bool, integers or floats; or [tokens] with `bytes`, for rows of unequal length."""


@dataclass(frozen=True, slots=True)
class Media:
    """Bytes that a record refers to by hash: an image as received, or the settings of the image processor."""

    sha256: str
    """Hex SHA-256 of `data`. The store uses it as key, so equal bytes are stored once."""
    mime: str
    """MIME type of the bytes, such as `image/png`; `application/json` for settings."""
    data: bytes


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The span of an image in a context: its placeholder ids, which are all equal and have the provenance MEDIA."""

    start: int
    length: int
    sha256: str
    """SHA-256 of the image's bytes."""
    settings: str
    """SHA-256 of the settings that the image was processed with."""


@dataclass(frozen=True, slots=True)
class LineageEdge:
    """The origin of a branch of a session."""

    kind: str
    """`subagent`, `compaction`, `side_call`, `retry` or `edit`."""
    turn: int
    """The first turn of the branch."""
    parent_session: str
    """The session of the turn that the branch comes from: the same session, or one that a header named."""
    parent: int | None
    """The turn that the branch comes from; None if that session has no earlier turn or is not in the record."""
    evidence: str
    confidence: float
    """1.0 if a header names the origin, less if it is inferred from the messages."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """A named array with one row per token of a trajectory."""

    rows: npt.NDArray[Any]
    """Shape [tokens, ...]; a missing row is zeros. Rows of unequal length are `bytes`; a missing row is empty."""
    known: npt.NDArray[np.bool_]
    """True where the engine returned a row, shape [tokens]."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One root-to-leaf path as arrays. All per-token arrays have the length of `token_ids`."""

    session_id: str
    leaf: int
    """`seq` of the last turn."""
    token_ids: TokenIds
    provenance: Codes
    loss_mask: npt.NDArray[np.bool_]
    """True for sampled tokens that no earlier trajectory of the session trains."""
    logprobs: Logprobs
    """The engine's logprob for sampled tokens, 0.0 for others."""
    turns: tuple[int, ...]
    """`seq` of each turn, root first."""
    completion_starts: npt.NDArray[np.int32]
    """Offset of each turn's first sampled token."""
    completion_ends: npt.NDArray[np.int32]
    """Offset after each turn's last sampled token."""
    weight_versions: tuple[str, ...]
    """One per turn: the version of the weights that sampled its first token."""
    reward: float | None
    """Reward of the whole path, or the session's reward if the path has none."""
    verdict: str
    """State of the context, which trainers filter by: `exact`; `forked: CAUSE`; `closed` if the gateway ended a turn
    that the model had not ended; `captured` or `captured with drift` if the server rendered the contexts. Reservations
    follow after a comma; see `_session.verdict`."""
    metadata: Mapping[str, Any]
    turn_rewards: npt.NDArray[np.float64]
    """Reward of each turn's action; NaN for turns without one."""
    weight_spans: tuple[tuple[int, int, str], ...]
    """(start, end, version): the version of the weights that sampled tokens [start, end). The spans cover every sampled
    token, in order, and each lies within one turn."""
    columns: Mapping[str, TokenValues] = field(default_factory=dict)
    """Columns by name. A missing value is NaN for tokens in `loss_mask`, 0.0 for others."""
    payloads: Mapping[str, TokenRows] = field(default_factory=dict)
    """Arrays that the engine returned per token, by name, such as routed experts."""
    media: tuple[MediaSpan, ...] = ()
    """The images of the context, in order."""
    sampled_from: tuple[TokenDistribution | None, ...] = ()
    """One per turn: the distribution that it was sampled from; None if not known."""
    logprobs_of: tuple[TokenDistribution | None, ...] = ()
    """One per turn: the distribution that its `logprobs` belong to; None if not known."""
    finish_reasons: tuple[FinishReason | None, ...] = ()
    """One per turn: why sampling ended; None for turns of old records, for which it is not known.

    A turn with tool calls has `stop`, although clients see `tool_calls`: trainers read here whether a completion was
    cut, and SkyRL can mask turns with other values than `stop`.
    """
    adapters: tuple[str | None, ...] = ()
    """One per turn: the LoRA adapter that sampled it; None for the model itself, and in files without this field."""
    role: str = ""
    """`main`, `subagent` or `side_call`, from the lineage of the path; empty if it was not computed."""
    lineage: tuple[LineageEdge, ...] = ()
    """The origins of the branches on the path, in order of their first turns."""

    def __post_init__(self) -> None:
        for name in ("sampled_from", "logprobs_of", "finish_reasons", "adapters"):
            if not getattr(self, name):
                object.__setattr__(self, name, (None,) * len(self.turns))

    def completions(self) -> Iterator[tuple[int, int, int]]:
        """Yield for each turn its `seq`, the offset of its first sampled token and the offset after its last one."""
        return zip(self.turns, self.completion_starts.tolist(), self.completion_ends.tolist(), strict=True)

    @property
    def truncated(self) -> bool | None:
        """Return whether the last turn reached its token budget; None if not known."""
        last = self.finish_reasons[-1] if self.finish_reasons else None
        return None if last is None else last == "length"

    def _repr_html_(self) -> str:
        rows = {
            "verdict": self.verdict,
            "reward": self.reward,
            "turns": ", ".join(map(str, self.turns)),
            "tokens": f"{len(self.token_ids):,}",
            "sampled": f"{int((self.provenance == Provenance.SAMPLED).sum()):,}",
            "with loss": f"{int(self.loss_mask.sum()):,}",
            "token by token": "tokentape.viewer.shown_with(trajectory, tokenizer)",
        }
        return html_table(f"Session {self.session_id}, branch to turn {self.leaf}", rows.items())


def html_table(title: str, rows: Iterable[Sequence[Any]]) -> str:
    """Return an HTML table for a notebook, with escaped text. Invisible characters are shown as `U+XXXX`."""

    def cell(value: Any, tag: str = "td") -> str:
        seen = "".join(char if char.isprintable() else f"U+{ord(char):04X}" for char in str(value))
        return f"<{tag}>{escape(seen)}</{tag}>"

    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table>{cell(title, 'caption')}{body}</table>"
