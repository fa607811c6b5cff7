"""An engine that directs a harness, and knows from that where each call comes from; scores of the edges found.

What a scene makes a harness send has random words in it (`Director.word`). From them the engine knows who asks: the
user's conversation, a subagent, a title. The true edges follow from what the engine told the harness to do, never from
what the record says.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.gateway.scripted import ScriptedEngine
from tests.harness.scripted_agents import OFFLINE, program_of
from tests.session.lineage_traffic import KINDS, SENTENCES
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import SampleDelta, SamplingParams
from tokentape.errors import EngineUnavailable
from tokentape.store import SqliteStore
from tokentape.store._reads import lineage_of
from tokentape.types import TokenIds

_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.S)
_CONTROL = re.compile(r"(<\|\w+\|>|</?\w+>)")


@dataclass(frozen=True, slots=True)
class Request:
    """A call as the engine sees it."""

    number: int
    messages: Sequence[tuple[str, str]]
    """Roles and texts. Results of tools have the role `user`, as the template writes them."""
    prompt: str

    @property
    def system(self) -> str:
        """The system prompt, with the tools."""
        return "".join(text for role, text in self.messages if role == "system")

    @property
    def users(self) -> list[str]:
        """The user's messages, without results of tools."""
        return [text for role, text in self.messages if role == "user" and "<tool_response>" not in text]

    def since(self, word: str) -> int:
        """Return the number of replies after the last message that has a word."""
        at = max(at for at, (role, text) in enumerate(self.messages) if role != "assistant" and word in text)
        return sum(role == "assistant" for role, _ in self.messages[at:])


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine answers, and what that call is."""

    text: str
    kind: str | None = None
    """The true edge of a branch that this call starts; None if it has none."""
    parents: Sequence[int] = ()
    """Numbers of the calls that the edge may come from."""
    fails: bool = False
    """Whether the engine fails in the middle of the reply."""
    lost: bool = False
    """Whether the connection is reset while the reply is sent."""


@dataclass(slots=True)
class Call:
    """A call of the engine."""

    prompt: list[int]
    ids: list[int]
    answer: Answer


class Director(ScriptedEngine):
    """Samples the text that `answer` returns, in splits that the tokenizer does not make."""

    def __init__(self, renderer: Renderer, seed: int, answer: Callable[[Request], Answer] | None = None) -> None:
        super().__init__(renderer, [], sampling=self.EVERYTHING)
        self.rng = random.Random(seed)
        self.answer = answer or (lambda request: Answer(self.text()))
        self.calls: list[Call] = []
        self._texts = self.rng.sample(SENTENCES, len(SENTENCES))

    def word(self) -> str:
        """Return a word that is nowhere else."""
        return "".join(self.rng.choices("bcdfghjklmnpqrstvwxz", k=9))

    def text(self, sentences: int = 1) -> str:
        """Return sentences of the documentation, each once as long as there are some."""
        self._texts = self._texts if len(self._texts) >= sentences else self.rng.sample(SENTENCES, len(SENTENCES))
        return " ".join(_CONTROL.sub("", self._texts.pop()) for _ in range(sentences))

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        call = self._call(prompt_ids)
        for at, token_id in enumerate(call.ids):
            if call.answer.fails and at == 6:
                raise EngineUnavailable("the engine was restarted")
            last = at == len(call.ids) - 1
            yield SampleDelta((token_id,), (-0.5,), *(("stop", token_id) if last else (None, None)), (), "7")

    def _call(self, prompt_ids: TokenIds) -> Call:
        prompt = self._tokenizer.decode(prompt_ids)
        ids = prompt_ids.tolist()
        answer = self.answer(Request(len(self.calls), _MESSAGE.findall(prompt), prompt))
        failed = [
            at for at, call in enumerate(self.calls) if call.prompt == ids and (call.answer.fails or call.answer.lost)
        ]
        if failed:
            # The harness repeats what failed.
            answer = replace(answer, kind="retry", parents=failed)
        parts = [
            [piece] if _CONTROL.fullmatch(piece) else re.findall(r"(?s).{1,3}", piece)
            for piece in _CONTROL.split(f"{answer.text}<|im_end|>")
        ]
        sampled = [token_id for part in parts for piece in part for token_id in self._tokenizer.encode_plain(piece)]
        self.calls.append(Call(ids, sampled, answer))
        return self.calls[-1]


def tool_call(name: str, **arguments: Any) -> str:
    """Return a call as the tiny model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def run_script(name: str, package: str, home: Path, folder: Path, *arguments: str) -> None:
    """Run one of `agents/` in a Python that has a package. Raises `AssertionError` if it fails."""
    python = program_of(name, package)
    assert python is not None
    script = str(Path(__file__).parents[1] / "agents" / name)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "AGNO_TELEMETRY": "false", **OFFLINE}
    run = subprocess.run(
        [python, script, *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=1800
    )
    assert run.returncode == 0, run.stderr[-4000:]


@dataclass(slots=True)
class Cutting:
    """Resets the connection in the middle of the next reply, once, on request."""

    app: ASGIApp
    cut: bool = False
    refuse: int = 0
    """The status of the next reply; the call does not reach the gateway."""
    statuses: list[tuple[str, int]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def cutting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.statuses.append((f"{scope['method']} {scope['path']}", message["status"]))
            if self.cut and message["type"] == "http.response.body":
                self.cut = False
                raise ConnectionResetError("cut by the test")
            await send(message)

        if self.refuse and scope["type"] == "http":
            status, self.refuse = self.refuse, 0
            await JSONResponse({"error": {"message": "later"}}, status)(scope, receive, cutting)
            return
        await self.app(scope, receive, cutting if scope["type"] == "http" else send)


@dataclass(slots=True)
class Counts:
    """Counts by kind, and the missed or wrong edges."""

    right: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    true: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Add other counts."""
        for name in ("right", "found", "true", "misses"):
            getattr(self, name).update(getattr(other, name))
        self.details += other.details

    def plain(self) -> dict[str, dict[str, int]]:
        """Return the counts for a JSON file."""
        return {name: dict(sorted(getattr(self, name).items())) for name in ("right", "found", "true", "misses")}

    def rows(self) -> list[str]:
        """Return the lines of a table."""
        return [
            f"{kind:12} {self.true[kind]:5}  {self.right[kind] / max(self.found[kind], 1):9.3f}  "
            f"{self.right[kind] / max(self.true[kind], 1):6.3f}"
            for kind in KINDS
        ]


def scored(store: SqliteStore, director: Director) -> Counts:
    """Compare the edges of all sessions of a record with the director's."""
    counts = Counts()
    sessions = [store.load_session(session.info.session_id) for session in store.sessions()]
    recorded: dict[int, tuple[str, int]] = {}
    numbers: dict[tuple[str, int], int] = {}
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, call in enumerate(director.calls):
        by_prompt.setdefault(tuple(call.prompt), []).append(number)
    for session in sessions:
        after: list[list[int]] = []
        for turn in session.turns:
            context = ([] if turn.parent is None else after[turn.parent]) + turn.added_ids.tolist()
            ids, candidates = turn.completion_ids.tolist(), by_prompt[tuple(context)]
            after.append(context + ids)
            # A reply that failed is the beginning of one.
            number = next(candidate for candidate in candidates if director.calls[candidate].ids[: len(ids)] == ids)
            candidates.remove(number)
            recorded[number], numbers[session.info.session_id, turn.seq] = (session.info.session_id, turn.seq), number
    for session in sessions:
        name = session.info.session_id
        edges = {edge.turn: edge for edge in lineage_of(store.load_session, session)}
        counts.found.update(edge.kind for edge in edges.values())
        for seq in _begins(session.turns):
            answer, edge = director.calls[numbers[name, seq]].answer, edges.get(seq)
            if answer.kind is not None:
                counts.true[answer.kind] += 1
            allowed = {recorded[parent] for parent in answer.parents if parent in recorded}
            if edge is not None and edge.kind == answer.kind and (edge.parent_session, edge.parent) in allowed:
                counts.right[edge.kind] += 1
            elif edge is not None or answer.kind is not None:
                was = "none" if edge is None else edge.kind + (" of another turn" if edge.kind == answer.kind else "")
                counts.misses[f"expected {answer.kind}, found {was}"] += 1
                counts.details.append(f"{name} turn {seq}: expected {answer.kind} from {sorted(allowed)}, found {edge}")
    return counts


def _begins(turns: Sequence[Any]) -> Iterator[int]:
    """Yield the turns that begin branches."""
    seen = set[int]()
    for turn in turns:
        if turn.parent is None or turn.parent in seen:
            yield turn.seq
        if turn.parent is not None:
            seen.add(turn.parent)
