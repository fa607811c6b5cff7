"""Test continuations, kinds of new messages after a turn: which bridge is exact, does the template only append."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from string import ascii_lowercase
from typing import TypeAlias, TypeVar

from tokentape.chat import _grammar as grammar
from tokentape.chat._bridge import TurnSuffix, trim_to_turn_end
from tokentape.chat._certificate import Continuation, Strategy
from tokentape.chat._compared_strings import HIGHEST
from tokentape.chat._grammar import Conversation
from tokentape.chat._renderer import Renderer
from tokentape.chat._strategy import local_or_contextual, reaches_prompt
from tokentape.chat._tokenizer import MARK
from tokentape.errors import TemplateRefused
from tokentape.types import Message, Setup

_Asked = TypeVar("_Asked")
_Rewritten: TypeAlias = tuple[str, tuple[Message, ...]]
"""How a template rewrites earlier text, and a conversation in which it does."""

_FROM_BEST: tuple[Strategy, ...] = ("local", "contextual", "fork", "refused")
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
        first: Conversation | None = None
        compared = self._renderer.template.compared
        strategy: Strategy = "contextual" if compared.number > HIGHEST else "local"
        rewritten: dict[bool, _Rewritten] = {}
        """The first conversations that show how the template rewrites earlier text, by whether their turn is clean."""
        ends: dict[str, None] = {}
        for conversation in grammar.conversations(name, compared):
            history, reply, _ = conversation
            try:
                # If the turn's prompt can't be rendered, no model can have written the turn.
                self._marked(history, generate=True)
                self._marked(conversation.messages, generate=True)
                own_strategy, suffix = self._strategy(conversation)
            except TemplateRefused as error:
                refusal = str(error)
                continue
            tried += 1
            first = first or conversation
            strategy = max(strategy, own_strategy, key=_FROM_BEST.index)
            ends |= dict.fromkeys(self._ends(reply, suffix))
            clean = grammar.is_clean(reply)
            reason = None if clean in rewritten else self._rewrites(conversation, suffix)
            if reason is not None:
                rewritten[clean] = reason, conversation.messages
        if first is None:
            return Continuation(name, "refused", append_only="no", tried=0, reason=refusal)
        for clean, rewriting in self._rarely_rewritten(name) if True not in rewritten else ():
            rewritten.setdefault(clean, rewriting)
            if clean:
                break
        if strategy in ("local", "contextual"):
            depends, rewritten_by_words = self._under_words(name, first.history)
            strategy = "fork" if self._depends_on_words(first) else "contextual" if depends else strategy
            if rewritten_by_words is not None:
                rewritten.setdefault(True, rewritten_by_words)
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
        """Return a copy of the message with these fields changed. The copy is cached, to render it only once."""
        return self._once(("with", id(message), *fields.items()), message, lambda: {**message, **fields})

    def _marked(self, messages: tuple[Message, ...], *, generate: bool) -> str:
        key = ("marked", generate, *map(id, messages))
        return self._once(key, messages, lambda: self._renderer.render_text(messages, self._setup, generate=generate))

    def _suffix(self, conversation: Conversation, *, local: bool = False) -> str:
        """Return the text after the turn: in this conversation or, with `local`, after a placeholder question."""
        reply, new, history = conversation.reply, conversation.new, None if local else conversation.history
        key = ("suffix", id(reply), *map(id, new), None, *map(id, history or ()))
        return self._once(key, conversation, lambda: self._renderer.suffix(reply, new, self._setup, history))

    def _local_or_contextual(self, conversation: Conversation, suffix: str) -> Strategy:
        return local_or_contextual(lambda: self._suffix(conversation, local=True), suffix)

    def _strategy(self, conversation: Conversation) -> tuple[Strategy, str | None]:
        """Return the strategy for one conversation, and its suffix if that contains all new messages."""
        history, reply, new = conversation
        try:
            suffix = self._suffix(conversation)
        except TemplateRefused:
            if reaches_prompt(self._renderer, self._setup, [*history, reply], new):
                return "fork", None
            raise
        if any(word in suffix for word in grammar.words_of([*history, *self._setup.tools])):
            return "fork", suffix
        if grammar.is_clean(reply) and reply["content"] and self._depends_on_turn(conversation, suffix):
            return "fork", suffix
        return self._local_or_contextual(conversation, suffix), suffix

    def _depends_on_turn(self, conversation: Conversation, suffix: str) -> bool:
        """Return whether the text after a turn depends on the turn's text, for which `suffix` has a sentinel.

        For example, a template may write how long the turn is, or whether it is ASCII.
        """
        content = conversation.reply["content"]
        after = set() if conversation.reply.get("tool_calls") else {suffix}
        for text in (content, f"{content} {content}"):
            whole = conversation._replace(reply=self._with(conversation.reply, content=text)).messages
            _, found, rest = self._marked(whole, generate=True).rpartition(text)
            after.add(rest if found else "")
        return len(after) > 1

    def _depends_on_words(self, accepted: Conversation) -> bool:
        """Return whether the text after a turn depends on words in parts of it for which a suffix has sentinels.

        `accepted` is a conversation that the template accepts. Its turn gets the words.
        """
        keys = self._renderer.template.compared.keys

        def differs(reply: Message) -> bool:
            conversation = accepted._replace(reply=reply)
            return not self._marked(conversation.messages, generate=True).endswith(self._suffix(conversation))

        if differs(accepted.reply):
            return False
        for words in filter(None, self._words(accepted.new)):
            with contextlib.suppress(TemplateRefused):
                if differs(grammar.saying(accepted.reply, words, keys)):
                    return True
        return False

    def _words(self, new: tuple[Message, ...]) -> Iterator[str]:
        """Yield the words that the template compares with texts, unusual texts, and the texts of the new messages."""
        compared = self._renderer.template.compared
        strings, count = compared.strings, max(compared.length // 5, min(compared.number, HIGHEST))
        # It may look for several in one text, or for a text with many characters, words or lines.
        together = (" ".join(strings),) if len(strings) > 1 else ()
        long = ("long\n" * (count + 1),) if count > 1 else ()
        repeated = (message["content"] for message in new)
        yield from dict.fromkeys((*strings, *together, *long, *grammar.UNUSUAL_TEXTS, *repeated))

    def _under_words(self, name: str, shortest: tuple[Message, ...]) -> tuple[bool, _Rewritten | None]:
        """Try histories with words that the template compares with texts, such as `/no_think`, and unusual texts.

        Earlier messages also say the same as the new messages, which a template may compare with each other.

        `shortest` is the shortest history after which the template accepts the continuation's turn and new messages.

        Return whether the suffix depends on the words, and how and in which conversation the template rewrites earlier
        text because of them.
        """
        replies, new = grammar.CONTINUATIONS[name.partition("/")[0]]
        compared = self._renderer.template.compared
        reply, depends = replies[0], False
        speaking = reply if reply["content"] else self._with(reply, content="An answerword.")
        thinking = self._with(reply, reasoning_content="A thoughtword.")
        rewritten: _Rewritten | None = None

        def note(conversation: Conversation, suffix: str) -> None:
            nonlocal rewritten
            reason = self._rewrites(conversation, suffix)
            rewritten = (reason, conversation.messages) if reason is not None else rewritten

        for words in self._words(new):
            with_words = self._with(reply, content=words) if words else speaking
            contents = words, "A plainword."
            changed = [tuple(self._with(message, content=content) for message in new) for content in contents]
            for history in grammar.histories_with(words, compared.keys, min(compared.number, HIGHEST)):
                if grammar.NO_SYSTEM in name and history[0]["role"] == "system":
                    continue
                usual = Conversation(history, reply, new)
                try:
                    suffix = self._suffix(usual)
                    depends = depends or self._local_or_contextual(usual, suffix) != "local"
                    spoken, spoken_with_words = (usual._replace(reply=turn) for turn in (speaking, with_words))
                    depends = depends or self._suffix(spoken) != self._suffix(spoken_with_words)
                    for turn in (reply, thinking) if rewritten is None else ():
                        note(usual._replace(reply=turn), suffix)
                    # The template may count the messages with these words, or look for a part of them that is in `new`.
                    for messages in changed if not depends else ():
                        counted = usual._replace(new=messages)
                        depends |= self._local_or_contextual(counted, self._suffix(counted)) != "local"
                except TemplateRefused:
                    continue
                if depends and rewritten is not None:
                    return depends, rewritten
            # In a new message, the words may change the text before that message; in the turn, how it is written.
            changed_messages = [
                (*new[:n], self._with(message, content=words), *new[n + 1 :]) for n, message in enumerate(new)
            ]
            tried = [(turn, later) for later in changed_messages for turn in (reply, thinking)]
            if words:
                tried.append((self._with(reply, content=words.strip()), new))
            for turn, later in tried if rewritten is None else ():
                with contextlib.suppress(TemplateRefused):
                    conversation = Conversation(shortest, turn, later)
                    note(conversation, self._suffix(conversation))
        return depends, rewritten

    def _accepted(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return grammar.accepted(messages, self._renderer.format(self._setup))

    def _rarely_rewritten(self, name: str) -> Iterator[tuple[bool, _Rewritten]]:
        """Yield (whether the turn is clean, rewriting) for tokens that merge and for calls without results."""
        for merging in self._that_merge(self._accepted((grammar.QUESTION,))):
            yield grammar.is_clean(merging[-1]), (_MERGES, merging)
        for numbered in self._numbered(name):
            with contextlib.suppress(TemplateRefused):
                if self._rewrites(numbered, self._suffix(numbered)) == _MERGES:
                    yield True, (_MERGES, numbered.messages)
        for unanswered in grammar.with_calls_unanswered(name) if self._setup.tools else ():
            conversation = unanswered._replace(history=self._accepted(unanswered.history))
            with contextlib.suppress(TemplateRefused):
                reason = self._rewrites_unanswered(conversation)
                if reason is not None:
                    yield True, (reason, conversation.messages)

    def _that_merge(self, history: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
        """Yield conversations with a reply whose beginning merges into one token with the end of its prompt.

        The reply is the rest of a vocabulary entry that begins with the prompt's last characters. If a prompt ends with
        the caller's text, any last characters are possible.
        """
        tokenizer, framed = self._renderer.tokenizer, bool(self._renderer.format(self._setup).content_open)
        questions, text = [history, *self._with_other_ends(history)], history[-1]["content"]
        if self._marked(history, generate=True).endswith(text):
            questions += [(*history[:-1], {**history[-1], "content": f"{text} {end}"}) for end in ascii_lowercase]
        for question in questions:
            prompt = self._marked(question, generate=True)
            answered = (*question, grammar.TURNS["content"])
            if framed and prompt + answered[-1]["content"] not in self._marked(answered, generate=False):
                continue  # The model writes the content's frame first. Some templates have it only before some turns.
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

    def _numbered(self, name: str) -> Iterator[Conversation]:
        """Yield conversations in which a clean turn may merge with the number at the end of its prompt."""
        replies, new = grammar.CONTINUATIONS[name.partition("/")[0]]
        for start in ((grammar.QUESTION,), (grammar.SYSTEM, grammar.QUESTION)):
            for history in self._with_other_ends(self._accepted(start)):
                for reply in filter(grammar.is_clean, replies):
                    yield Conversation(history, reply, new)

    def _rewrites_unanswered(self, conversation: Conversation) -> str | None:
        """Return how earlier ids change after calls without results; None if they don't."""
        prompt = self._marked(conversation.history, generate=True)
        turn = self._marked(conversation.messages, generate=True)[len(prompt) :]
        if any(call["function"]["name"] not in turn for call in conversation.reply["tool_calls"]):
            # Some templates drop the calls of a turn that has content, even if it is empty (DeepSeek-V3).
            conversation = conversation._replace(reply={**conversation.reply, "content": None})
        return self._rewrites(conversation, self._strategy(conversation)[1])

    def _rewrites(self, conversation: Conversation, suffix: str | None) -> str | None:
        """Return how rendering the longer conversation changes earlier ids; None if it does not."""
        full = self._marked(conversation.messages, generate=True)
        if suffix is None:
            return "a new message's text is written before the turn"
        prompt = self._marked(conversation.history, generate=True)
        spoken = self._marked((*conversation.history, conversation.reply), generate=False)
        if not spoken.startswith(prompt):
            return "the generation prompt differs from what the template later writes before the turn"
        after = self._after_turn(conversation.reply, suffix)
        if not full.startswith(prompt):
            return "the text before the turn is written differently once the conversation goes on"
        turn = full[len(prompt) : len(full) - len(after.text)]
        if not full.endswith(after.text) or not spoken[len(prompt) :].startswith(turn):
            return "the turn is written differently once the conversation goes on"
        pieces = self._ids(prompt) + self._ids_after_control(turn) + self._ids_after_control(after.text)
        return _MERGES if pieces != self._ids(full) else None

    def _after_turn(self, reply: Message, suffix: str) -> TurnSuffix:
        renderer, setup = self._renderer, self._setup
        close = self._once(("close", id(reply)), reply, lambda: renderer.turn_close(reply, setup))
        return trim_to_turn_end(suffix, close, renderer.format(setup), renderer.tokenizer)

    def _ends(self, reply: Message, suffix: str | None) -> Iterator[str]:
        """Yield the token with which the template ends such a turn, if it is a stop token."""
        mark = MARK.match(self._after_turn(reply, suffix).text) if suffix is not None else None
        tokenizer = self._renderer.tokenizer
        if mark is not None and mark[0] in tokenizer.marks(self._renderer.stop_ids(self._setup)):
            yield tokenizer.control_of_mark(mark[0]).content
