"""Compare a bridge that was used with the template's rendering of the real conversation.

A local bridge is computed after a placeholder user message, because the certificate shows that the history does not
matter. Here the whole conversation is rendered, with the model's reply. The rendered text from the end of the sampled
turn to the end of the generation prompt must equal the bridge's text. Earlier text is not compared: there the template
may drop thinking or space JSON differently, and the model may sample ids that the tokenizer would not choose.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from tokentape.chat._call_syntax import common_prefix, common_suffix
from tokentape.chat._reader import read_text
from tokentape.chat._renderer import PromptTokens, Renderer
from tokentape.chat._template import with_argument_objects
from tokentape.chat._tokenizer import MARK
from tokentape.errors import TemplateRefused, TokentapeError
from tokentape.types import Message, Provenance, Setup, TokenIds

_SHOWN = 60
"""The number of characters of each side in a reported difference."""


@dataclass(frozen=True, slots=True)
class BridgeCheck:
    outcome: Literal["same", "differs", "unknown"]
    """`unknown` means that the template does not render the conversation."""
    detail: str = ""
    """If `unknown`, the reason. If `same`, a difference that is not an error."""
    expected: str = ""
    """If `differs`, the end of the template's text that the bridge lacks, with control tokens spelled out."""
    found: str = ""
    """If `differs`, the end of the bridge's text in place of `expected`."""
    contextual: bool = False
    """If `differs`, whether a bridge computed from the real conversation equals the template's text."""


def check_bridge(
    renderer: Renderer,
    setup: Setup,
    history: Sequence[Message],
    reply: Message,
    new_messages: Sequence[Message],
    completion_ids: TokenIds,
    added: PromptTokens,
) -> BridgeCheck:
    """Compare the bridge `added` with the template's rendering of `history`, `reply` and `new_messages`.

    `history` contains the recorded messages before `reply`; `completion_ids` are the sampled ids that `reply` was
    parsed from.
    """
    history, reply = [*map(with_argument_objects, history)], with_argument_objects(reply)
    try:
        real = _RealRendering(renderer, setup, history, reply, new_messages)
        check = real.compare(completion_ids, added)
        why = real.separates_content_and_calls(added) if check.outcome == "differs" else ""
        if why:
            # The sampled content is already in the context: expect the bridge of a turn that has only the calls.
            calling = {key: value for key, value in reply.items() if key not in ("content", "reasoning_content")}
            calls_only = _RealRendering(renderer, setup, history, {**calling, "content": None}, new_messages)
            if calls_only.compare(completion_ids, added).outcome == "same":
                return BridgeCheck("same", why)
    except TokentapeError as error:
        return BridgeCheck("unknown", f"the template does not render the conversation ({type(error).__name__})")
    if check.outcome != "differs":
        return check
    try:
        bridge = renderer.bridge(completion_ids, reply, new_messages, setup, history)
        contextual = real.compare(completion_ids, bridge).outcome == "same"
    except TokentapeError:
        contextual = False
    return BridgeCheck("differs", "", check.expected, check.found, contextual)


class _RealRendering:
    """The template's rendering of a caller's conversation, not of a test conversation.

    Raises `TemplateRefused` if the template refuses it.
    """

    def __init__(
        self, renderer: Renderer, setup: Setup, history: Sequence[Message], reply: Message, new: Sequence[Message]
    ) -> None:
        self._renderer = renderer
        self._setup = setup
        self._history = history
        self._reply = reply
        try:
            text = renderer.render_text([*history, reply, *new], setup, generate=True)
        except TemplateRefused:
            # Some templates accept a reply without content only if its content is an empty string.
            self._history = [*map(_with_content, history)]
            self._reply = reply = _with_content(reply)
            text = renderer.render_text([*self._history, reply, *new], setup, generate=True)
        self._text = self._once(text)
        self._sentinel = f"tokentape{secrets.token_hex(8)}"
        self._edged = _with_sentinel(reply, self._sentinel)
        self._new = new

    def compare(self, completion_ids: TokenIds, added: PromptTokens) -> BridgeCheck:
        """Return `same` if the rendering ends with the sampled turn's end, followed by the bridge; else `differs`."""
        closed = int(np.argmax(np.append(added.provenance != Provenance.CLOSE, True)))
        ended = self._read(np.concatenate([completion_ids, added.ids[:closed]]))
        bridge = self._once(self._read(added.ids[closed:]))
        stopped = not closed and len(completion_ids) and completion_ids[-1] in self._renderer.stop_ids(self._setup)
        if stopped and self._text.endswith(ended + bridge):
            return BridgeCheck("same")
        before = self._before(self._text, bridge)
        ending = self._before(self._suffix, bridge)
        if before is not None and ending is None:
            # The template writes a different suffix after a sentinel: compare only the turn's last control token.
            marks = list(MARK.finditer(before))
            ending = before[marks[-1].start() :] if marks and self._stops_at(marks[-1][0]) else ""
        if before is not None and ending is not None and self._ends_turn(ending, ended, bridge):
            return BridgeCheck("same")
        text = self._suffix or self._text
        shared = common_suffix(text, bridge)
        spell = self._renderer.tokenizer.spell_marks
        expected, actual = (spell(string[: len(string) - shared])[-_SHOWN:] for string in (text, bridge))
        return BridgeCheck("differs", expected=expected, found=actual)

    def separates_content_and_calls(self, added: PromptTokens) -> str:
        """Say how the template separates or drops a turn's content or calls; empty if it keeps both in the turn."""
        content = self._reply.get("content")
        content_text = content.strip() if isinstance(content, str) and self._reply.get("tool_calls") else ""
        if content_text and not self._suffix:
            return "the template leaves out the calls of a turn that has content, and their end"
        if content_text and content_text in self._suffix and content_text not in self._read(added.ids):
            return "the template repeats the turn's content after its calls; the bridge does not"
        return ""

    def _ends_turn(self, ending: str, ended: str, bridge: str) -> bool:
        """Return whether the sampled turn ended the way the template ends it.

        `ending` is the template's text between the reply's last text and the bridge. It begins with text that the model
        writes, such as a call's closing brackets, in the template's spacing. `ended` is the text of the sampled ids and
        the ids that closed the turn.
        """
        marks, sampled = MARK.findall(ending), MARK.findall(ended)
        stopped = bool(sampled) and self._stops_at(sampled[-1])
        if not marks:
            again = stopped and bridge.lstrip().startswith(sampled[-1])
            spaced = not ending or _last_space(ending) == _last_space(ended)
            return not again and spaced and _squeezed(ended).endswith(_squeezed(ending))
        if ended.endswith(ending):
            return True
        if stopped:
            if MARK.split(ending)[-1] != MARK.split(ended)[-1]:
                return False
            # A sampled stop token may differ from the token with which the template ends turns. It can't stand in for
            # the next message's header, which directly follows a turn if the template has no such token.
            if marks[-1] != sampled[-1] and not MARK.search(self._after_reply([], generate=False)):
                return False
            if marks[:-1] == sampled[-len(marks) : -1]:
                return True
        elif not self._reply.get("tool_calls") or any(map(self._stops_at, marks)):
            # The bridge should have closed a truncated turn; only the end of a call is left to the model.
            return False
        # The model wrote its call differently or did not finish it. Compare with the close that the template writes.
        close = self._after_reply([], generate=False)
        # `ending` may be normalized, see `_before`.
        shared = ending[: max(common_prefix(ending, text) for text in (close, self._normal(close)))]
        ended_before = any(map(self._stops_at, MARK.findall(shared)))
        return shared == ending or (ending[len(shared) :] == marks[-1] and not ended_before)

    def _stops_at(self, mark: str) -> bool:
        return mark in self._renderer.tokenizer.marks(self._renderer.stop_ids(self._setup))

    @cached_property
    def _suffix(self) -> str:
        """The template's text after the reply's last text, with the new messages."""
        return self._after_reply(self._new, generate=True)

    def _after_reply(self, new: Sequence[Message], *, generate: bool) -> str:
        """Return the template's text after the reply's last text; empty if a sentinel in its place is not rendered."""
        try:
            shown = self._renderer.render_text([*self._history, self._edged, *new], self._setup, generate=generate)
        except TokentapeError:
            return ""
        return self._once(shown.partition(self._sentinel)[2])

    def _before(self, text: str, bridge: str) -> str | None:
        """Return `text` without the bridge at its end; None if it does not end with the bridge."""
        if not text.endswith(bridge):
            # Tokenizers may normalize text: encode and decode the end of the text, from a mark on.
            most = max(len(text) - 2 * len(bridge) - _SHOWN, 0)
            start = max((match.start() for match in MARK.finditer(text, 0, most)), default=0)
            text = text[:start] + self._normal(text[start:])
        return text[: len(text) - len(bridge)] if text.endswith(bridge) else None

    def _normal(self, text: str) -> str:
        tokenizer = self._renderer.tokenizer
        return self._once(self._read(tokenizer.array(tokenizer.encode_after_control(text).ids)))

    def _read(self, ids: TokenIds) -> str:
        return read_text(self._renderer.tokenizer, ids.tolist())

    def _once(self, text: str) -> str:
        """Replace each run of image placeholders by one, because the template writes one for each image."""
        images = self._renderer.images
        control = None if images is None else self._renderer.tokenizer.control_by_id(images.placeholder_id)
        return text if control is None else re.sub(f"(?:{control.mark})+", control.mark, text)


def _with_content(message: Message) -> Message:
    return {**message, "content": message.get("content") or ""} if message["role"] == "assistant" else message


def _with_sentinel(reply: Message, sentinel: str) -> Message:
    """Return the reply with the sentinel after its content, or as an additional argument of its last call.

    If the last call has no arguments, the reply has no sentinel.
    """
    calls: list[dict[str, Any]] = list(reply.get("tool_calls") or ())
    if not calls:
        return {**reply, "content": (reply.get("content") or "") + sentinel}
    function = calls[-1]["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, dict) and arguments:
        calls[-1] = {**calls[-1], "function": {**function, "arguments": {**arguments, "tokentape": sentinel}}}
    return {**reply, "tool_calls": calls}


def _squeezed(text: str) -> str:
    return re.sub(r"[\s\"']+", "", text)


def _last_space(text: str) -> str:
    return text[len(text.rstrip()) :]
