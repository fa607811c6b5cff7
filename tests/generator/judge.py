"""Compare the product with the oracle on one case's conversations, and say where the product's claims are false."""

from __future__ import annotations

import os.path
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.generator.compare import checks_of, composed, reply_differs, squeezed
from tests.generator.conversations import Conversation, Message, words_in
from tests.generator.independence import (
    AFTER_RESULTS,
    answered,
    counts_saying,
    dependence,
    has_shortest,
    histories_saying,
)
from tests.generator.oracle import Reference, Refused, appends, end_of_reply
from tests.generator.product import Product, message_of
from tests.generator.replies import Spoken, expected_tail, spoken_turn
from tokentape.chat._certificate import Continuation
from tokentape.errors import TemplateRefused

INDEPENDENT = "continuations that do not depend on the history"
ENOUGH = 2
"""Conversations below which a continuation is not called needlessly contextual: it may depend on the messages."""
LOCAL = "of these certified local"


@dataclass(frozen=True)
class Finding:
    """One false claim or failure."""

    kind: str
    conversation: int
    detail: str


@dataclass
class Judge:
    """Judges one case. `counts` says how often what was compared, also where nothing was found."""

    reference: Reference
    product: Product
    end_tokens: frozenset[str]
    """Tokens that end assistant turns; empty where that is not known (real templates)."""
    rng_of: Callable[[str], random.Random]
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def judge(self, conversations: Sequence[Conversation], constants: Sequence[str]) -> None:
        """Judge all conversations, then what the certificate says of all of them together.

        `constants` are strings that the template looks for.
        """
        for conversation in conversations:
            try:
                self._conversation(conversation)
            except Refused:
                self.counts["transformers refused"] += 1
        self._continuations(conversations, constants)

    def _found(self, kind: str, conversation: Conversation, detail: str) -> None:
        self.findings.append(Finding(kind, conversation.number, detail[:400]))

    def _called(self, kind: str, conversation: Conversation, call: Callable[[], Any]) -> Any:
        """What a call of the product returns; None if it raises what it should not raise."""
        try:
            return call()
        except TemplateRefused:
            raise
        except Exception as error:
            self._found(kind, conversation, f"{type(error).__name__}: {error}")
            return None

    def _conversation(self, one: Conversation) -> None:
        prompt = self.reference.render(one.history, one.tools, generate=True)
        if one.forged and self.reference.spells_control([one.history, one.tools]):
            self._forged(one)
        else:
            self._prompt(one, prompt)
        if self.reference.spells_control([one.history, one.reply, one.new, one.tools]):
            return
        spoken = self.reference.render([*one.history, one.reply], one.tools, generate=False)
        full = self.reference.render([*one.history, one.reply, *one.new], one.tools, generate=True)
        turn = spoken_turn(self.reference, self.product.stop_ids(one.tools), one, prompt, spoken, full)
        if turn is None:
            self.counts["not compared: the template leaves the reply out"] += 1
            return
        if turn.halted:
            before = self.reference.render(one.history, one.tools, generate=False)
            header = prompt.startswith(before) and turn.stop in prompt[len(before) :]
            kind = "stop within turn: a header" if header else "stop within turn"
            self._found(kind, one, f"{turn.stop!r} stands within the template's own turn {turn.text!r}")
            return
        self._appends(one, prompt, spoken, full, turn)
        self._bridge(one, prompt, full, turn)
        self._splice(one, prompt, full, turn)
        self._parse(one, prompt, turn)
        self._truncated(one, turn)

    # -- prompts -----------------------------------------------------------------------------------------------------

    def _prompt(self, one: Conversation, prompt: str) -> None:
        self.counts["prompts"] += 1
        try:
            ids = self._called("exception in render", one, lambda: self.product.render(one.history, one.tools))
        except TemplateRefused as error:
            roles = {message["role"] for message in one.history} - {"tool", "assistant"}
            seen = {m["role"] for m in one.history if any(word in prompt for word in words_in(m))}
            if roles <= seen:
                self._found("false refusal of a prompt", one, str(error))
            return
        expected = self.reference.encode(prompt)
        if ids is not None and ids != expected.ids:
            at = next((n for n, (a, b) in enumerate(zip(ids, expected.ids, strict=False)) if a != b), None)
            around = prompt[expected.spans[at][0] :][:24] if at is not None else "the end"
            self._found(
                "prompt ids",
                one,
                f"{ids[at : at + 5] if at is not None else len(ids)} instead of "
                f"{expected.ids[at : at + 5] if at is not None else len(expected.ids)} at {around!r}",
            )

    def _forged(self, one: Conversation) -> None:
        self.counts["forged prompts"] += 1
        try:
            ids = self._called("exception in render", one, lambda: self.product.render(one.history, one.tools))
            harmless = self.reference.render(
                self.reference.neutral(one.history), self.reference.neutral(one.tools), generate=True
            )
        except TemplateRefused:
            return
        if ids is None:
            return
        expected = self.reference.control_counts(self.reference.encode(harmless).ids)
        if self.reference.control_counts(ids) != expected:
            self._found("injection", one, f"{self.reference.control_counts(ids)} control tokens, expected {expected}")

    # -- bridges -----------------------------------------------------------------------------------------------------

    def _appends(self, one: Conversation, prompt: str, spoken: str, full: str, turn: Spoken) -> None:
        row = self.product.row(one.history, one.new, one.tools)
        if row is None or row.append_only == "no":
            return
        content = one.reply.get("content") or ""
        clean = content == content.strip() and bool(content or one.reply.get("tool_calls"))
        if row.append_only == "clean text" and not clean:
            return
        self.counts["claims of append-only"] += 1
        own = spoken[len(prompt) : turn.spoken_end] if spoken.startswith(prompt) else ""
        problem = appends(self.reference, prompt, spoken, full, own)
        if problem:
            self._found("false append-only", one, f"{row.name}: {problem}")

    def _before(self, one: Conversation) -> list[int]:
        """The ids of the prompt that the reply is sampled after."""
        return self.reference.encode(self.reference.render(one.history, one.tools, generate=True)).ids

    def _bridge(self, one: Conversation, prompt: str, full: str, turn: Spoken) -> None:
        expected = expected_tail(self.reference, one, full, turn, self.end_tokens)
        if not turn.stop and self.product.left_in_reasoning(prompt, turn.text):
            # The template shows the turn without the reasoning that its prompt opens. What was sampled is all of it
            # reasoning, cut short: it has no calls that could be answered, and it is closed first.
            self.counts["turns that do not close the reasoning that their prompt opens"] += 1
            self._after_any(one, turn.ids)
            return
        if expected is None:
            self.counts["not compared: the reply ends otherwise in the whole rendering"] += 1
            return
        try:
            strategy = self._called(
                "exception in choose", one, lambda: self.product.strategy(one.history, one.reply, one.new, one.tools)
            )
        except TemplateRefused as error:
            self._refused(one, full, turn, str(error))
            return
        if strategy is None:
            return
        self.counts[f"strategy {strategy}"] += 1
        if strategy == "fork":
            return
        history = one.history if strategy == "contextual" else None
        problem = self._bridge_differs(one, turn, expected, history)
        if problem.startswith("refused: "):
            self._refused(one, full, turn, problem)
        elif problem and self._leaves_out_what_is_repeated(one, full, turn, history):
            self.counts["bridges without content that the template repeats after results"] += 1
        elif problem and strategy == "local" and not self._bridge_differs(one, turn, expected, one.history):
            self._found("false local", one, problem)
        elif problem:
            self._found("bridge ids" if problem.startswith("ids ") else "wrong bridge", one, f"{strategy}: {problem}")

    def _leaves_out_what_is_repeated(
        self, one: Conversation, full: str, turn: Spoken, history: Sequence[Message] | None
    ) -> bool:
        """Whether the bridge lacks only content that stands beside calls and is written again after their results.

        That is the policy of docs/decisions/0013: it was sampled in the turn, and the certificate does not say that
        such a continuation appends only.
        """
        content = one.reply.get("content")
        row = self.product.row(one.history, one.new, one.tools)
        if not content or not one.reply.get("tool_calls") or (row is not None and row.append_only != "no"):
            return False
        if not all(word in full[turn.full_end :] for word in words_in(content)):
            return False
        silent = replace(one, reply={**one.reply, "content": ""})
        written = self.reference.render([*silent.history, silent.reply, *silent.new], silent.tools, generate=True)
        end = end_of_reply(written, silent.reply, silent.new)
        if end is None:
            return False
        expected = expected_tail(self.reference, silent, written, replace(turn, full_end=end), self.end_tokens)
        return expected is not None and not self._bridge_differs(one, turn, expected, history)

    def _splice(self, one: Conversation, prompt: str, full: str, turn: Spoken) -> None:
        """A conversation rendered from the start, with the sampled ids in place of the reply."""
        messages = [*one.history, one.reply, *one.new]
        try:
            ids = self._called(
                "exception in splice",
                one,
                lambda: self.product.splice(messages, one.tools, {len(one.history): turn.ids}),
            )
        except TemplateRefused:
            return
        if ids is None:
            return
        if not turn.own:
            return
        self.counts["spliced"] += 1
        if not any(ids[n : n + len(turn.ids)] == turn.ids for n in range(len(ids) - len(turn.ids) + 1)):
            # No claim is false: nothing is spliced where turns can't be told apart. It is worth a count.
            self.counts["spliced without the sampled ids"] += 1
        expected = expected_tail(self.reference, one, full, turn, self.end_tokens)
        whole, before = self.reference.encode(full).ids, self.reference.encode(prompt).ids
        if expected is not None and [*before, *turn.ids, *(expected[0][1] or [])] == whole != ids:
            self._found("splice ids", one, f"{self.reference.decode(ids)[-300:]!r} instead of {full[-300:]!r}")

    def _bridge_differs(
        self,
        one: Conversation,
        turn: Spoken,
        expected: Sequence[tuple[str, list[int] | None]],
        history: Sequence[Message] | None,
    ) -> str:
        """How the product's bridge differs from what is expected; empty if it does not."""
        try:
            ids = self.product.bridge(turn.ids, one.reply, one.new, one.tools, history, self._before(one))
        except TemplateRefused as error:
            return f"refused: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        text = self.reference.decode(ids)
        for wanted, wanted_ids in expected:
            if ids == wanted_ids:
                return ""
            # Where text meets text no ids are certain; nor is the space that some tokenizers put before a first word.
            again = self.reference.decode(self.reference.encode(wanted).ids)
            if wanted_ids is None and composed(text) in (composed(wanted), composed(again)):
                return ""
        wanted, wanted_ids = expected[0]
        if wanted_ids is not None and text.split() == self.reference.decode(wanted_ids).split():
            return f"ids {ids[:12]} instead of {wanted_ids[:12]} for {wanted[:60]!r}"
        return f"{text[-200:]!r} instead of {wanted[-200:]!r}"

    def _refused(self, one: Conversation, full: str, turn: Spoken, reason: str) -> None:
        tail = full[turn.full_end :]
        if all(any(word in tail for word in words_in(message)[-1:]) for message in one.new):
            self._found("false refusal of a bridge", one, reason)

    # -- replies -----------------------------------------------------------------------------------------------------

    def _parse(self, one: Conversation, prompt: str, turn: Spoken) -> None:
        self.counts["replies parsed"] += 1
        try:
            reply = self.product.parse(turn.ids, one.tools, self._before(one))
            if one.number % 3 == 0 and self.product.parse(turn.ids, one.tools, self._before(one), step=1) != reply:
                self._found("reply depends on how it is cut", one, turn.text)
        except Exception as error:
            self._found("exception in parser", one, f"{type(error).__name__}: {error}: {turn.text}")
            return
        if not turn.own or one.constant or not all(word in turn.text for word in words_in(one.reply)):
            return
        if self.reference.decode_whole(turn.ids).split() != turn.text.split():
            self.counts["not compared: tokenizers itself decodes the reply otherwise"] += 1
            return
        if self.product.left_in_reasoning(prompt, turn.text):
            self.counts["not compared: the turn does not close the reasoning that its prompt opens"] += 1
            return
        checks = checks_of(one.reply)
        if not self.product.parses(checks):
            self.counts["not compared: the certificate does not say that it is parsed"] += 1
            return
        exact = self.reference.decode_whole(turn.ids) == turn.text
        problem = reply_differs(one.reply, message_of(reply, one.reply), composed if exact else squeezed)
        if problem:
            self._found("false claim of parsing", one, f"{problem}; {turn.text[:160]!r}")

    def _truncated(self, one: Conversation, turn: Spoken) -> None:
        """Cut the turn at a random token: no exception, no lost message, and what was open is closed."""
        if len(turn.ids) < 3:
            return
        cut = turn.ids[: self.rng_of(f"cut {one.number}").randrange(1, len(turn.ids) - 1)]
        self.counts["truncated replies"] += 1
        self._after_any(one, cut)

    def _after_any(self, one: Conversation, cut: list[int]) -> None:
        """Go on after ids that are no whole turn."""
        try:
            reply = self.product.parse(cut, one.tools, self._before(one))
        except Exception as error:
            self._found("exception in parser", one, f"{type(error).__name__}: {error}: {self.reference.decode(cut)}")
            return
        said = message_of(reply, one.reply)
        new: list[Message] = [{"role": "user", "content": "go on zqfollowup"}]
        if said.get("tool_calls"):
            return
        try:
            prompt = self.reference.render(one.history, one.tools, generate=True)
            full = self.reference.render([*one.history, said, *new], one.tools, generate=True)
            strategy = self.product.strategy(one.history, said, new, one.tools)
            if strategy == "fork":
                return
            history = one.history if strategy == "contextual" else None
            ids = self._called(
                "exception in bridge",
                one,
                lambda: self.product.bridge(cut, said, new, one.tools, history, self._before(one)),
            )
        except (Refused, TemplateRefused):
            return
        if ids is None:
            return
        text = self.reference.decode(ids)
        if "zqfollowup" in full and "zqfollowup" not in text:
            self._found("message lost after a truncated reply", one, f"{text!r} after {self.reference.decode(cut)!r}")
        content = (reply.reasoning if reply.reasoning_open else reply.content).strip()
        if reply.tool_calls or not content or full.count(content) != 1 or (reply.reasoning_open and reply.content):
            return
        if self.reference.spells_control(content):
            self.counts["not compared: content with a control token that the parser does not know"] += 1
            return
        without = self.reference.render([*one.history, _saying_otherwise(said), *new], one.tools, generate=True)
        if content in without:
            return  # The template leaves the reply out, and writes the same itself.
        at = full.rindex(content)
        followed = full.rfind(new[0]["content"])
        if at < max((full.rfind(word) for word in words_in(list(one.history))), default=0) or 0 <= followed <= at:
            return  # The template leaves the reply out, and others say the same.
        tail = full[at + len(content) :]
        sampled = self.reference.decode(cut)
        after = sampled.rpartition(content)[2] if content in sampled else ""
        stop = self.reference.first_control(after)
        if stop is not None and stop[0] + len(stop[1]) < len(after):
            return
        self.counts["bridges after truncated replies"] += 1
        # After a stop that was sampled stands what the template writes after that one.
        expected = tail.partition(stop[1])[2] if stop is not None and stop[1] in tail else tail
        other = self.reference.first_control(tail) if stop is not None and expected == tail else None
        if other is not None and self.reference.added[stop[1]]["id"] in self.product.stop_ids(one.tools):
            # It ends the turn in place of the token that the template writes there, but is no next message's header.
            replaced = tail[other[0] + len(other[1]) :]
            expected = replaced if squeezed(text) == squeezed(replaced) else expected
        # What was sampled after the content may be its white space. Some tokens take along what follows them.
        again = self.reference.decode(self.reference.encode(expected).ids)
        lines = [one.partition("zqfollowup")[0].count("\n") for one in (text, expected, again)]
        exact = lines[0] in lines[1:] or not sampled.endswith(content)
        if squeezed(text) != squeezed(expected) or not exact:
            before = (prompt + sampled).rpartition(content)[0].rstrip()
            opening = [token for token in self.reference.controls if full[:at].rstrip().endswith(token)]
            if opening and not before.endswith(tuple(opening)):
                self.counts["not compared: content without what the template opens it with"] += 1
                return
            if reply.reasoning_open and self._lacks_only_a_frame(one, said, new, text, expected):
                self.counts["bridges after truncated reasoning without the frame of an empty content"] += 1
                return
            kind = "wrong bridge after a truncated reply"
            self._found(kind, one, f"{text!r} instead of {expected!r} after {sampled!r}")

    def _lacks_only_a_frame(
        self, one: Conversation, said: Message, new: Sequence[Message], text: str, expected: str
    ) -> bool:
        """Whether a bridge closes reasoning and ends the turn, but without the frame of an empty content in between.

        How a turn ends is what the template writes after a content that is not empty; without content some end none.
        """
        answered = {**said, "content": "say zqanswer"}
        full = self.reference.render([*one.history, answered, *new], one.tools, generate=True)
        after = full.rpartition("zqanswer")[2]
        ended = os.path.commonprefix([after[::-1], expected[::-1]])[::-1]
        close = self.reference.first_control(expected)
        if close is None:
            return False
        # White space before it is the end of what was sampled.
        closed = expected[: close[0] + len(close[1])].lstrip()
        allowed = [closed + ended, closed + after, *([ended] if ended.lstrip().startswith(closed) else [])]
        return squeezed(text) in map(squeezed, allowed)

    # -- all conversations together ----------------------------------------------------------------------------------

    def _continuations(self, conversations: Sequence[Conversation], constants: Sequence[str]) -> None:
        """Compare what the certificate says of each continuation with whether its tail depends on the history."""
        rows: dict[str, tuple[Continuation, list[Conversation]]] = {}
        for one in conversations:
            row = self.product.row(one.history, one.new, one.tools)
            spelled = self.reference.spells_control([one.history, one.reply, one.new, one.tools])
            if row is not None and row.strategy != "refused" and answered(one) and not spelled:
                rows.setdefault(row.name, (row, []))[1].append(one)
        # A control token that a caller spells is text for the product, which the template does not see as it is.
        said = [*(c.history for c in conversations), *map(tuple, histories_saying(constants))]
        histories = [history for history in said if not self.reference.spells_control(history)]
        for row, same in rows.values():
            needed = "/no-system" not in row.name if "/no-tools" in row.name else None
            asked = [h for h in histories if needed in (None, _says_system(h))]
            asked += AFTER_RESULTS if needed is None else []
            why = dependence(self.reference, same, asked)
            # New messages that say what the template looks for may hide that it looks for it in the history too.
            silent = [one for one in same if not any(text in repr([one.reply, one.new]) for text in constants)]
            if why == "" and len(silent) < len(same):
                why = dependence(self.reference, silent, asked)
            if why == "" and silent and not needed:
                shortest = min(silent, key=lambda one: len(one.new))
                why = counts_saying(self.reference, shortest, constants, tools=needed is None)
            if why:
                self.counts["continuations that depend on the history"] += 1
                if row.strategy == "local":
                    self._found("false local", same[0], f"{row.name}: {why}")
            elif why is not None:
                self.counts[INDEPENDENT] += 1
                self.counts[LOCAL] += row.strategy == "local"
                if row.strategy != "local" and len(silent) >= ENOUGH and has_shortest(row.name, silent):
                    detail = f"{row.name}: the same tail after {len(asked)} histories; {row.reason}"
                    self._found(f"needless {row.strategy}", same[0], detail)


def _saying_otherwise(message: Message) -> Message:
    """Return an assistant message with other words."""
    return {key: "zqother" if isinstance(value, str) and key != "role" else value for key, value in message.items()}


def _says_system(history: Sequence[Message]) -> bool:
    return any(message["role"] == "system" for message in history)
