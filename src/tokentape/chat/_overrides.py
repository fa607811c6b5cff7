"""Replace the parser or the renderer that Tokentape derives from a chat template.

Pass `Overrides` to `Renderer.load`, or register a function under the entry point group `tokentape.renderers`. A
tokenizer's `response_template` also overrides the parser. The first of these is used: the argument, the entry points
in order of their names, the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, TypeAlias

from tokentape.chat._parse import ReplyParser
from tokentape.chat._reader import Reader
from tokentape.chat._reply import Reply, ReplyDelta
from tokentape.errors import TokentapeError
from tokentape.types import Setup

if TYPE_CHECKING:
    from tokentape.chat._external_renderer import RendererObject
    from tokentape.chat._renderer import Renderer

GROUP = "tokentape.renderers"
"""The entry point group. Each entry is a `FindOverrides`."""


MakeParser: TypeAlias = Callable[[Setup, Sequence[str]], ReplyParser]
"""Takes a completion's setup and stop strings, and returns the parser for that completion."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """A parser and a renderer that replace those derived from the template. None keeps the derived one."""

    name: str
    """A part of the fingerprint. Change it when the behavior changes, because certificates are cached under it."""
    parser: MakeParser | None = None
    renderer: RendererObject | None = None
    """Renders and bridges. It also parses if `parser` is None."""


FindOverrides: TypeAlias = "Callable[[Renderer], Overrides | None]"
"""Takes a renderer (see its `template.source`, `tokenizer`, `fingerprint`) and returns its overrides, or None."""


def find_overrides(renderer: Renderer) -> Overrides | None:
    """Return a renderer's overrides from the entry points or its tokenizer's `response_template`, or None.

    Raises `TokentapeError` if an entry point can't be imported or fails.
    """
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            overrides: Overrides | None = entry.load()(renderer)
        except Exception as error:
            raise TokentapeError(
                f"the entry point {entry.name!r} in group {GROUP!r} ({entry.value}) failed: {type(error).__name__}: "
                f"{error}. Uninstall or fix the package that registers it."
            ) from error
        if overrides is not None:
            return overrides
    template = renderer.tokenizer.config.get("response_template")
    if template is None:
        return None

    from tokentape.chat._response_template import shipped_parser

    return shipped_parser(renderer, template)


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole completion, the argument of functions passed to `parse_whole`."""

    ids: tuple[int, ...]
    """All sampled ids."""
    text: str
    """The text before the stop token or stop string. Control tokens are spelled out, so they look like text."""
    stopped: bool
    """Whether a stop token or stop string ended the completion. If not, it was truncated."""
    setup: Setup
    stop_strings: tuple[str, ...] = ()


def parse_whole(renderer: Renderer, parse: Callable[[Completion], Reply]) -> MakeParser:
    """Return a parser that calls `parse` once, when the completion ends. Until then, it returns no text.

    >>> Overrides("shouting", parser=parse_whole(renderer, parse))      # doctest: +SKIP
    """
    return lambda setup, stop_strings: _WholeParser(renderer, parse, setup, stop_strings)


class _WholeParser:
    def __init__(
        self, renderer: Renderer, parse: Callable[[Completion], Reply], setup: Setup, stop_strings: Sequence[str]
    ) -> None:
        self._tokenizer = renderer.tokenizer
        self._parse = parse
        self._setup = setup
        self._stop_strings = stop_strings
        self._reader = Reader(renderer.tokenizer, renderer.stop_ids(setup), stop_strings)
        self._ids: list[int] = []

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        fed = list(ids)
        self._ids += fed
        self._reader.feed(fed)
        return ReplyDelta()

    def finish(self) -> tuple[ReplyDelta, Reply]:
        self._reader.finish()
        text = self._tokenizer.spell_marks(self._reader.text)
        try:
            reply = self._parse(
                Completion(tuple(self._ids), text, self._reader.stopped, self._setup, tuple(self._stop_strings))
            )
        except Exception as error:
            # The error's text is left out because it may quote the completion.
            raise TokentapeError(f"the overriding parser failed with {type(error).__name__}") from error
        return ReplyDelta(reply.content, reply.reasoning, reply.calls_for_client), reply
