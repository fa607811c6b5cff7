"""Malformed completions: turns truncated, spliced and shuffled, and random ids."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tokentape.chat import _grammar as grammar
from tokentape.chat._call_syntax import PROBE_ID
from tokentape.chat._certification import written_turn
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import MARK
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Setup, Tool

FREE: Tool = {
    "type": "function",
    "function": {"name": "free", "description": "Takes anything.", "parameters": {"type": "object"}},
}
TOOLS = (grammar.TOOL, FREE)

WORD = re.compile(r"(?<!\w)zq[a-y]{5}z(?!\w)")
"""A whole planted word. Letters only, so that it is valid wherever a word is."""

_PIECE = re.compile(rf"({MARK.pattern}|</?[^<>\s]*>|\w+|\s+|.)", re.DOTALL)
_DEEP = ("{", "[", "(", '{"a":', "[[", '{"name": "free", "arguments": {"a": ', "<a>", '"', "\\")


def word(rng: random.Random) -> str:
    """Return a planted word."""
    return "zq" + "".join(rng.choices("abcdefghijklmnopqrstuvwxy", k=5)) + "z"


def _value(rng: random.Random, depth: int = 0) -> Any:
    kinds: Sequence[Callable[[], Any]] = (
        lambda: word(rng),
        lambda: f'{word(rng)} "{word(rng)}" it\'s; k={word(rng)}, {{x}}',
        lambda: f"line {word(rng)}\n\n  <{word(rng)}>\n",
        lambda: rng.choice([None, True, False, 7, -0.5, "null", "None", "", "42"]),
        lambda: [_value(rng, depth + 1) for _ in range(rng.randint(0, 3))],
        lambda: {word(rng): _value(rng, depth + 1) for _ in range(rng.randint(0, 2))},
    )
    return rng.choice(kinds[: 4 if depth > 1 else None])()


def _message(rng: random.Random) -> Message:
    """Return an assistant message with planted words in all its parts."""
    message: dict[str, Any] = {"role": "assistant", "content": rng.choice(["", word(rng), f"  {word(rng)}\n{{é日🫠\n"])}
    if rng.random() < 0.4:
        message["reasoning_content"] = f"{word(rng)}.\nMore {word(rng)}."
    calls = []
    for n in range(rng.choice([0, 1, 1, 2, 3])):
        arguments = {rng.choice(["place", "count", "tags", word(rng)]): _value(rng) for _ in range(rng.randint(0, 3))}
        function = {"name": rng.choice(["measure", "free"]), "arguments": arguments}
        calls.append({"id": f"{PROBE_ID[:-1]}{n}", "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
    return message


def written(renderer: Renderer, setup: Setup, rng: random.Random, count: int) -> list[str]:
    """Return marked texts of turns as the template writes them."""
    texts = []
    for message in [*grammar.TURNS.values(), *(_message(rng) for _ in range(count))]:
        try:
            turn = written_turn(renderer, setup, message)
        except TemplateRefused:
            continue
        if turn is not None:
            texts.append(turn[1])
    return texts


class Completions:
    """Completions of a renderer under a setup; the n-th is the same in each run with the same seed."""

    def __init__(self, renderer: Renderer, setup: Setup, seed: str) -> None:
        self._tokenizer = renderer.tokenizer
        self._seed = seed
        rng = random.Random(seed)
        self.turns = written(renderer, setup, rng, 24) or ["a word"]
        # Control tokens that a reply may hold, most of them from the template.
        self._marks = sorted({mark for turn in self.turns for mark in MARK.findall(turn)})
        self._marks += [control.mark for control in renderer.tokenizer.controls[:40]]
        self._pieces = sorted({piece for turn in self.turns for piece in _PIECE.findall(turn)})
        self._stops = sorted(renderer.stop_ids(setup))
        self._lone = [n for n in range(renderer.tokenizer.vocab_size) if _is_lone(_bytes(renderer, n))][:4000]
        self._kinds: Mapping[str, Callable[[random.Random], list[int]]] = {
            "written": lambda rng: self._ids(rng.choice(self.turns), rng),
            "truncated": self._truncated,
            "spliced": self._spliced,
            "delimiters": lambda rng: self._ids("".join(self._shuffled(rng)), rng),
            "controls": self._with_controls,
            "lone bytes": self._with_lone_bytes,
            "nested": self._nested,
            "random ids": lambda rng: [self._any_id(rng) for _ in range(rng.randint(0, 60))],
        }

    def __getitem__(self, n: int) -> tuple[str, list[int]]:
        """Return the kind and the ids of the n-th completion."""
        kinds = list(self._kinds)
        kind = kinds[n % len(kinds)]
        rng = random.Random(f"{self._seed} {n}")
        ids = self._kinds[kind](rng)
        if self._stops and rng.random() < 0.5:
            ids = [*ids, rng.choice(self._stops)]
        return kind, ids

    def _ids(self, text: str, rng: random.Random) -> list[int]:
        """Encode text. Half of the time, cut it at random positions, as a model may sample it."""
        cuts = sorted(rng.sample(range(len(text) + 1), min(3, len(text)))) if rng.random() < 0.5 else []
        # A mark is two characters.
        cuts = [cut for cut in cuts if not (0 < cut < len(text) and MARK.match(text, cut - 1))]
        return [
            token_id
            for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
            for token_id in self._tokenizer.encode_after_control(text[start:end]).ids
        ]

    def _truncated(self, rng: random.Random) -> list[int]:
        ids = self._ids(rng.choice(self.turns), rng)
        return ids[: rng.randint(0, len(ids))]

    def _spliced(self, rng: random.Random) -> list[int]:
        parts = [self._ids(rng.choice(self.turns), rng) for _ in range(rng.randint(2, 3))]
        return [n for ids in parts for n in ids[slice(*sorted((rng.randint(0, len(ids)), rng.randint(0, len(ids)))))]]

    def _shuffled(self, rng: random.Random) -> list[str]:
        """Return pieces of a turn: some doubled, omitted, swapped, from another turn, or with words between them."""
        pieces = _PIECE.findall(rng.choice(self.turns))
        for _ in range(rng.randint(1, 6)):
            at, other = rng.randint(0, len(pieces)), rng.randint(0, len(pieces))
            match rng.randint(0, 5):
                case 0:
                    pieces[at:at] = pieces[at : at + 1]
                case 1:
                    del pieces[at : at + 1]
                case 2:
                    pieces[at:other] = pieces[at:other][::-1]
                case 3:
                    pieces.insert(at, rng.choice(self._pieces))
                case 4:
                    pieces.insert(at, f" {word(rng)} ")
                case _:
                    pieces[at:at] = pieces[other : other + rng.randint(1, 8)]
        return pieces

    def _with_controls(self, rng: random.Random) -> list[int]:
        pieces = _PIECE.findall(rng.choice(self.turns))
        for _ in range(rng.randint(1, 5)):
            pieces.insert(rng.randint(0, len(pieces)), rng.choice(self._marks) if self._marks else "<")
        return self._ids("".join(pieces), rng)

    def _with_lone_bytes(self, rng: random.Random) -> list[int]:
        ids = self._ids(rng.choice(self.turns), rng)
        for _ in range(rng.randint(1, 6)):
            if self._lone:
                ids.insert(rng.randint(0, len(ids)), rng.choice(self._lone))
        return ids

    def _nested(self, rng: random.Random) -> list[int]:
        pieces = _PIECE.findall(rng.choice(self.turns))
        at = rng.randint(0, len(pieces))
        opening = rng.choice([*_DEEP, "".join(pieces[: rng.randint(1, 8)])])
        deep = opening * (rng.choice([3, 30, 300, 3000]) if len(opening) < 8 else rng.choice([3, 30]))
        return self._ids("".join([*pieces[:at], deep, *pieces[at:]]), rng)

    def _any_id(self, rng: random.Random) -> int:
        if self._marks and rng.random() < 0.3:
            return self._tokenizer.control_of_mark(rng.choice(self._marks)).id
        return rng.randrange(self._tokenizer.vocab_size)


def _bytes(renderer: Renderer, token_id: int) -> bytes:
    (piece,) = renderer.tokenizer.pieces([token_id])
    return piece


def _is_lone(piece: bytes) -> bool:
    """Return whether these bytes end in a partial character."""
    try:
        piece.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return False


def cut(ids: Sequence[int], rng: random.Random) -> Iterator[Sequence[int]]:
    """Yield the ids in runs of random length, some of them empty."""
    at = 0
    longest = rng.choice([1, 3, 40])
    while at < len(ids):
        step = rng.randint(0, longest)
        yield ids[at : at + step]
        at += step
