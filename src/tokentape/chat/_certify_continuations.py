"""Test continuations, kinds of new messages after a turn: which bridge is exact, does the template only append."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from string import ascii_lowercase
from typing import TypeVar

from tokentape.chat import _grammar as grammar
from tokentape.chat._bridge import TurnSuffix, trim_to_turn_end
from tokentape.chat._certificate import Continuation, Strategy
from tokentape.chat._compared_strings import HIGHEST
from tokentape.chat._renderer import Renderer
from tokentape.chat._strategy import local_or_contextual, reaches_prompt
from tokentape.chat._tokenizer import MARK
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Setup

_Asked = TypeVar("_Asked")
_MERGES = "the text stays, but it encodes to different ids where the turn meets its prompt"


class Continuations:
    """Tests continuations under one setup. Renders what they have in common only once."""

    def __init__(self, renderer: Renderer, setup: Setup) -> None:
        self._renderer = renderer
        self._setup = setup
        self._known: dict[tuple[object, ...], tuple[object, object]] = {}
        tokenizer = renderer.tokenizer
        self._ids = functools.cache(lambda text: tokenizer.encode_marked(text).ids)
        self._ids_after_control = functools.cache(lambda text: tokenizer.encode_after_control(text).ids)

    def find(self, name: str) -> Continuation:
        """Test the continuation with this name; see `grammar.continuation_name`."""
        refusal = "the template accepted no conversation with it"
        tried = 0
        shortest: tuple[Message, ...] = ()
        strategy: Strategy = "local"
        rewritten: dict[bool, tuple[str, tuple[Message, ...]]] = {}
        ends: dict[str, None] = {}
        compared = self._renderer.template.compared
        if compared.number > HIGHEST:
            strategy = "contextual"
        for history, reply, new in grammar.conversations(name, compared):
            try:
                # If the turn's prompt can't be rendered, no model can have written the turn.
                self._marked(history, generate=True)
                full = self._marked((*history, reply, *new), generate=True)
                own_strategy, suffix = self._strategy(history, reply, new)
            except TemplateRefused as error:
                refusal = str(error)
                continue
            tried += 1
            shortest = shortest or history
            strategy = _worse(strategy, own_strategy)
            ends |= dict.fromkeys(self._ends(reply, suffix))
            clean = grammar.is_clean(reply)
            if clean not in rewritten:
                reason = self._rewrites(history, reply, full, suffix)
                if reason is not None:
                    rewritten[clean] = reason, (*history, reply, *new)
        if not tried:
            return Continuation(name, "refused", append_only="no", tried=0, reason=refusal)
        if True not in rewritten:
            for merging in self._that_merge(self._accepted((grammar.QUESTION,))):
                rewritten.setdefault(grammar.is_clean(merging[-1]), (_MERGES, merging))
                if True in rewritten:
                    break
        if True not in rewritten:
            found_merging = self._merges_with_number(name)
            if found_merging is not None:
                rewritten[True] = _MERGES, found_merging
        if True not in rewritten and self._setup.tools:
            for messages, reply, new in grammar.with_calls_unanswered(name):
                history = self._accepted(messages)
                reason = self._rewrites_unanswered(history, reply, new)
                if reason is not None:
                    rewritten.setdefault(True, (reason, (*history, reply, *new)))
        if strategy in ("local", "contextual"):
            depends, found_rewritten = self._under_words(name, shortest)
            strategy = "contextual" if depends else strategy
            if found_rewritten is not None:
                rewritten.setdefault(True, found_rewritten)
        if not rewritten:
            return Continuation(name, strategy, append_only="yes", tried=tried, reason="", ends=tuple(ends))
        clean = True in rewritten
        reason, counterexample = rewritten[clean]
        return Continuation(name, strategy, "no" if clean else "clean text", tried, reason, counterexample, tuple(ends))

    def _once(self, key: tuple[object, ...], messages: object, ask: Callable[[], _Asked]) -> _Asked:
        """Call `ask` once per key, and repeat its result or error. Keep `messages`: keys contain their `id()`."""
        if key not in self._known:
            try:
                self._known[key] = messages, ask()
            except TemplateRefused as error:
                self._known[key] = messages, error
        answer = self._known[key][1]
        if isinstance(answer, TemplateRefused):
            raise answer
        return answer  # type: ignore[return-value]

    def _with(self, message: Message, **fields: str) -> Message:
        """Return the message with changed fields, the same object each time, so that it is not rendered again."""
        return self._once(("with", id(message), *fields.items()), message, lambda: {**message, **fields})

    def _marked(self, messages: tuple[Message, ...], *, generate: bool) -> str:
        key = ("marked", generate, *map(id, messages))
        return self._once(key, messages, lambda: self._renderer.render_text(messages, self._setup, generate=generate))

    def _suffix(self, reply: Message, new: tuple[Message, ...], history: tuple[Message, ...] | None = None) -> str:
        messages = reply, new, history
        key = ("suffix", id(reply), *map(id, new), None, *map(id, history or ()))
        return self._once(key, messages, lambda: self._renderer.suffix(reply, new, self._setup, history))

    def _strategy(
        self, history: tuple[Message, ...], reply: Message, new: tuple[Message, ...]
    ) -> tuple[Strategy, str | None]:
        """Return the strategy for one conversation, and its suffix if that contains all new messages."""
        try:
            suffix = self._suffix(reply, new, history)
        except TemplateRefused:
            if reaches_prompt(self._renderer, self._setup, [*history, reply], new):
                return "fork", None
            raise
        if any(word in suffix for word in grammar.words_of([*history, *self._setup.tools])):
            return "fork", suffix
        return local_or_contextual(lambda: self._suffix(reply, new), suffix), suffix

    def _under_words(
        self, name: str, shortest: tuple[Message, ...]
    ) -> tuple[bool, tuple[str, tuple[Message, ...]] | None]:
        """Try histories with words that the template compares with texts, such as `/no_think`, and unusual texts.

        Earlier messages also say the same as the new messages, which a template may compare with each other.

        `shortest` is the shortest history after which the template accepts the continuation's turn and new messages.

        Return whether the suffix depends on the words, and how and in which conversation the template rewrites earlier
        text because of them.
        """
        replies, new = grammar.CONTINUATIONS[name.partition("/")[0]]
        reply, depends = replies[0], False
        speaking = reply if reply["content"] else self._with(reply, content="An answerword.")
        thinking = self._with(reply, reasoning_content="A thoughtword.")
        rewritten: tuple[str, tuple[Message, ...]] | None = None
        strings, length = self._renderer.template.compared.strings, self._renderer.template.compared.length
        # It may look for several in one text, or for a long text.
        together = (" ".join(strings),) if len(strings) > 1 else ()
        long = ("long " * (length // 5 + 1),) if length else ()
        repeated = (message["content"] for message in new)
        for words in dict.fromkeys((*strings, *together, *long, *grammar.UNUSUAL_TEXTS, *repeated)):
            with_words = self._with(reply, content=words)
            contents = words, "A plainword."
            said = [tuple(self._with(message, content=content) for message in new) for content in contents]
            for history in grammar.histories_with(words):
                if grammar.NO_SYSTEM in name and history[0]["role"] == "system":
                    continue
                try:
                    suffix = self._suffix(reply, new, history)
                    depends = depends or local_or_contextual(lambda: self._suffix(reply, new), suffix) != "local"
                    depends = depends or self._suffix(speaking, new, history) != self._suffix(with_words, new, history)
                    for turn in (reply, thinking) if rewritten is None else ():
                        full = self._marked((*history, turn, *new), generate=True)
                        reason = self._rewrites(history, turn, full, suffix)
                        rewritten = (reason, (*history, turn, *new)) if reason is not None else rewritten
                    # The template may count the messages with these words, or look for a part of them that is in `new`.
                    for messages in said if not depends else ():
                        local = functools.partial(self._suffix, reply, messages)
                        depends |= local_or_contextual(local, self._suffix(reply, messages, history)) != "local"
                except TemplateRefused:
                    continue
                if depends and rewritten is not None:
                    return depends, rewritten
            # In a new message, the words may change the text before that message.
            said_by = [(*new[:n], self._with(message, content=words), *new[n + 1 :]) for n, message in enumerate(new)]
            for later, turn in itertools.product(said_by, (reply, thinking)) if rewritten is None else ():
                with contextlib.suppress(TemplateRefused):
                    full = self._marked((*shortest, turn, *later), generate=True)
                    reason = self._rewrites(shortest, turn, full, self._suffix(turn, later, shortest))
                    rewritten = (reason, (*shortest, turn, *later)) if reason is not None else rewritten
        return depends, rewritten

    def _accepted(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return grammar.accepted(messages, self._renderer.format(self._setup))

    def _that_merge(self, history: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
        """Yield conversations with a reply whose beginning merges into one token with the end of its prompt.

        The reply is the rest of a vocabulary entry that begins with the prompt's last characters. If a prompt ends with
        the caller's text, any last characters are possible.
        """
        tokenizer = self._renderer.tokenizer
        if self._renderer.format(self._setup).content_open:
            return
        questions, text = [history, *self._with_other_ends(history)], history[-1]["content"]
        if self._marked(history, generate=True).endswith(text):
            questions += [(*history[:-1], {**history[-1], "content": f"{text} {end}"}) for end in ascii_lowercase]
        for question in questions:
            prompt = self._marked(question, generate=True)
            ends = [prompt[-n:] for n in range(1, 4) if not MARK.search(prompt[-n - 1 :])]
            ids = tokenizer.encode_marked(prompt).ids
            for end in ends:
                for rest in tokenizer.continuations(end):
                    if tokenizer.encode_marked(prompt + rest).ids[: len(ids)] != ids:
                        yield *question, {"role": "assistant", "content": rest}

    def _with_other_ends(self, history: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
        """Yield the question after more and more exchanges, while the prompt's end changes, for example in a number."""
        seen: set[str] = set()
        with contextlib.suppress(TemplateRefused):
            while len(seen) < 9 and (end := self._marked(history, generate=True)[-8:]) not in seen:
                if seen:
                    yield history
                seen.add(end)
                history = self._accepted(grammar.after_exchange(history))

    def _merges_with_number(self, name: str) -> tuple[Message, ...] | None:
        """Return a conversation in which a turn merges with the number at the end of its prompt; None if none does."""
        replies, new = grammar.CONTINUATIONS[name.partition("/")[0]]
        starts = ((grammar.QUESTION,), (grammar.SYSTEM, grammar.QUESTION))
        numbered = [history for start in starts for history in self._with_other_ends(self._accepted(start))]
        for history, reply in itertools.product(numbered, filter(grammar.is_clean, replies)):
            with contextlib.suppress(TemplateRefused):
                full = self._marked((*history, reply, *new), generate=True)
                if self._rewrites(history, reply, full, self._suffix(reply, new, history)) == _MERGES:
                    return (*history, reply, *new)
        return None

    def _rewrites_unanswered(
        self, history: tuple[Message, ...], reply: Message, new: tuple[Message, ...]
    ) -> str | None:
        """Return how earlier ids change after calls without results; None if they don't or such calls are refused."""
        try:
            full = self._marked((*history, reply, *new), generate=True)
            turn = full[len(self._marked(history, generate=True)) :]
            if any(call["function"]["name"] not in turn for call in reply["tool_calls"]):
                # Some templates drop the calls of a turn that has content, even if it is empty (DeepSeek-V3).
                reply = {**reply, "content": None}
                full = self._marked((*history, reply, *new), generate=True)
            return self._rewrites(history, reply, full, self._strategy(history, reply, new)[1])
        except TemplateRefused:
            return None

    def _rewrites(self, history: tuple[Message, ...], reply: Message, full: str, suffix: str | None) -> str | None:
        """Return how rendering the longer conversation changes earlier ids; None if it does not."""
        if suffix is None:
            return "a new message's text is written before the turn"
        prompt = self._marked(history, generate=True)
        spoken = self._marked((*history, reply), generate=False)
        if not spoken.startswith(prompt):
            return "the generation prompt differs from what the template later writes before the turn"
        after = self._after_turn(reply, suffix)
        if not full.startswith(prompt):
            return "the text before the turn is written differently once the conversation goes on"
        turn = full[len(prompt) : len(full) - len(after.text)]
        if not full.endswith(after.text) or not spoken[len(prompt) :].startswith(turn):
            return "the turn is written differently once the conversation goes on"
        pieces = self._ids(prompt) + self._ids_after_control(turn) + self._ids_after_control(after.text)
        return _MERGES if pieces != self._ids(full) else None

    def _after_turn(self, reply: Message, suffix: str) -> TurnSuffix:
        tokenizer = self._renderer.tokenizer
        key = "close", id(reply)
        close = self._once(key, reply, lambda: self._renderer.turn_close(reply, self._setup))
        return trim_to_turn_end(suffix, close, self._renderer.format(self._setup), tokenizer, tokenizer.eos_ids)

    def _ends(self, reply: Message, suffix: str | None) -> Iterator[str]:
        """Yield the token with which the template ends such a turn, if it is a stop token."""
        mark = MARK.match(self._after_turn(reply, suffix).text) if suffix is not None else None
        if mark is not None:
            control = self._renderer.tokenizer.control_of_mark(mark[0])
            if control.id in self._renderer.stop_ids(self._setup):
                yield control.content


def _worse(first: Strategy, second: Strategy) -> Strategy:
    order: tuple[Strategy, ...] = ("local", "contextual", "fork", "refused")
    return max(first, second, key=order.index)
