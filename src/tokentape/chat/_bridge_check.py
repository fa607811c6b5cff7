"""Compare a bridge that was used with the template's rendering of the real conversation.

A local bridge is computed after a made-up question, because a certificate says that the history does not matter. Here
the whole conversation is rendered, with the model's reply. The rendered text from the end of the sampled turn to the
end of the generation prompt must equal the bridge's text. The text before it is not compared: there the template may
drop thinking or space JSON in another way, and the model may sample ids that the tokenizer would not choose.
"""

from __future__ import annotations

import json
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
from tokentape.chat._tokenizer import MARK
from tokentape.errors import TemplateRefused, TokentapeError
from tokentape.types import Message, Provenance, Setup, TokenIds

_SHOWN = 60
"""Characters of each side that a difference shows."""


@dataclass(frozen=True, slots=True)
class BridgeCheck:
    outcome: Literal["same", "differs", "unknown"]
    """`unknown`: the template does not render the conversation."""
    detail: str = ""
    """With `unknown`: the reason. With `same`: a difference that is not an error."""
    expected: str = ""
    """With `differs`: the end of the template's text that the bridge lacks, control tokens spelled out."""
    found: str = ""
    """With `differs`: the end of the bridge's text in the place of `expected`."""
    contextual: bool = False
    """With `differs`: a bridge computed from the real conversation equals the template's text."""


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

    `history` has the recorded messages before `reply`, and `completion_ids` the sampled ids that `reply` was parsed
    from.
    """
    history, reply = [*map(_with_argument_objects, history)], _with_argument_objects(reply)
    try:
        real = _RealRendering(renderer, setup, history, reply, new_messages)
        check = real.compare(completion_ids, added)
        why = real.separates_content_and_calls(added) if check.outcome == "differs" else ""
        if why:
            # The sampled content is in the context already: the bridge is then the one that follows the calls alone.
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
    """The template's rendering of a real conversation. Raises `TemplateRefused` if the template refuses it."""

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
        """Return `same` if the rendering ends with the end of the sampled turn and then the bridge, else `differs`."""
        closed = int(np.argmax(np.append(added.provenance != Provenance.CLOSE, True)))
        ended = self._read(np.concatenate([completion_ids, added.ids[:closed]]))
        bridge = self._once(self._read(added.ids[closed:]))
        stopped = not closed and completion_ids[-1] in self._renderer.stop_ids(self._setup)
        if stopped and self._text.endswith(ended + bridge):
            return BridgeCheck("same")
        before = self._before(self._text, bridge)
        ending = self._before(self._suffix, bridge)
        if before is not None and ending is None:
            # The template writes another suffix after a sentinel: only the turn's last control token is compared.
            marks = list(MARK.finditer(before))
            ending = before[marks[-1].start() :] if marks and self._stops_at(marks[-1][0]) else ""
        if before is not None and ending is not None and self._ends_turn(ending, ended, bridge):
            return BridgeCheck("same")
        text = self._suffix or self._text
        shared = common_suffix(text, bridge)
        spell = self._renderer.tokenizer.spell_marks
        expected, found = (spell(string[: len(string) - shared])[-_SHOWN:] for string in (text, bridge))
        return BridgeCheck("differs", expected=expected, found=found)

    def separates_content_and_calls(self, added: PromptTokens) -> str:
        """Describe how the template treats a turn with content and calls if it does not keep both there, else empty."""
        content = self._reply.get("content")
        content_text = content.strip() if isinstance(content, str) and self._reply.get("tool_calls") else ""
        if content_text and not self._suffix:
            return "the template leaves out the calls of a turn that has content, and their end"
        if content_text and content_text in self._suffix and content_text not in self._read(added.ids):
            return "the template repeats the turn's content after its calls, the bridge not"
        return ""

    def _ends_turn(self, ending: str, ended: str, bridge: str) -> bool:
        """Return whether the sampled turn ended as the template ends it.

        `ending` is the template's text between the reply's last text and the bridge. It begins with text that the model
        writes, such as the closing brackets of a call, in the template's spacing. `ended` is the text of the sampled
        ids and of the ids that closed the turn.
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
            # The sampled stop token is kept in place of the template's. It does not replace the next message's header,
            # which alone follows a turn if the template has no token for the end of a turn.
            if marks[-1] != sampled[-1] and not MARK.search(self._after_reply([], generate=False)):
                return False
            if marks[:-1] == sampled[-len(marks) : -1]:
                return True
        elif not self._reply.get("tool_calls") or any(map(self._stops_at, marks)):
            # The bridge closes a truncated turn; only the end of a call is left to the model.
            return False
        # The model wrote its call in another way, or not to its end. Compare with the close that the template writes.
        close = self._after_reply([], generate=False)
        # `ending` may be normalized, see `_before`.
        shared = ending[: max(common_prefix(ending, text) for text in (close, self._normal(close)))]
        ended_before = any(map(self._stops_at, MARK.findall(shared)))
        return shared == ending or (ending[len(shared) :] == marks[-1] and not ended_before)

    def _stops_at(self, mark: str) -> bool:
        return self._renderer.tokenizer.control_of_mark(mark).id in self._renderer.stop_ids(self._setup)

    @cached_property
    def _suffix(self) -> str:
        """The template's text after the reply's last text, with the new messages."""
        return self._after_reply(self._new, generate=True)

    def _after_reply(self, new: Sequence[Message], *, generate: bool) -> str:
        """Return the template's text after the reply's last text; empty if a sentinel put there is not rendered."""
        try:
            shown = self._renderer.render_text([*self._history, self._edged, *new], self._setup, generate=generate)
        except TokentapeError:
            return ""
        return self._once(shown.partition(self._sentinel)[2])

    def _before(self, text: str, bridge: str) -> str | None:
        """Return `text` without the bridge at its end; None if it does not end with the bridge."""
        if not text.endswith(bridge):
            # Tokenizers may normalize text: replace the end of the text, from a mark on, by its encoded and read form.
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
        """Return the text with each run of image placeholders as one, as the template writes one for each image."""
        images = self._renderer.images
        control = None if images is None else self._renderer.tokenizer.control_by_id(images.placeholder_id)
        return text if control is None else re.sub(f"(?:{control.mark})+", control.mark, text)


def _with_argument_objects(message: Message) -> Message:
    """Return the message with the arguments of its calls parsed from JSON text to objects, as in requests."""
    calls = [dict(call) for call in message.get("tool_calls") or ()]
    for call in calls:
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except ValueError:
                continue
            if isinstance(parsed, dict):
                call["function"] = {**call["function"], "arguments": parsed}
    return {**message, "tool_calls": calls} if calls else message


def _with_content(message: Message) -> Message:
    return {**message, "content": message.get("content") or ""} if message["role"] == "assistant" else message


def _with_sentinel(reply: Message, sentinel: str) -> Message:
    """Return the reply with the sentinel after its content, or as a further argument of its last call.

    A reply with a last call without arguments is returned without the sentinel.
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
