"""Compare the product with the oracle on one case's conversations, and report its false claims."""

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
    dependence,
    depends_on_constants,
    has_shortest,
    histories_with,
)
from tests.generator.oracle import Reference, Refused, appends, end_of_reply
from tests.generator.product import Product, message_of
from tests.generator.replies import SampledTurn, expected_tail, sampled_turn
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
    """Judges one case. `counts` holds the number of comparisons by kind, also without findings."""

    reference: Reference
    product: Product
    end_tokens: frozenset[str]
    """Tokens that end assistant turns; empty where that is not known (real templates)."""
    rng_of: Callable[[str], random.Random]
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def judge(self, conversations: Sequence[Conversation], constants: Sequence[str]) -> None:
        """Judge all conversations, then the certificate's claims about all of them together.

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
        """The result of a call of the product; None if it raises an unexpected error."""
        try:
            return call()
        except TemplateRefused:
            raise
        except Exception as error:
            self._found(kind, conversation, f"{type(error).__name__}: {error}")
            return None

    def _conversation(self, conversation: Conversation) -> None:
        prompt = self.reference.render(conversation.history, conversation.tools, generate=True)
        if conversation.forged and self.reference.spells_control([conversation.history, conversation.tools]):
            self._forged(conversation)
        else:
            self._prompt(conversation, prompt)
        if self.reference.spells_control(
            [conversation.history, conversation.reply, conversation.new, conversation.tools]
        ):
            return
        with_reply = self.reference.render(
            [*conversation.history, conversation.reply], conversation.tools, generate=False
        )
        full = self.reference.render(
            [*conversation.history, conversation.reply, *conversation.new], conversation.tools, generate=True
        )
        turn = sampled_turn(
            self.reference, self.product.stop_ids(conversation.tools), conversation, prompt, with_reply, full
        )
        if turn is None:
            self.counts["not compared: the template leaves the reply out"] += 1
            return
        if turn.halted:
            before = self.reference.render(conversation.history, conversation.tools, generate=False)
            header = prompt.startswith(before) and turn.stop in prompt[len(before) :]
            kind = "stop within turn: a header" if header else "stop within turn"
            self._found(kind, conversation, f"{turn.stop!r} stands within the template's own turn {turn.text!r}")
            return
        self._appends(conversation, prompt, with_reply, full, turn)
        self._bridge(conversation, prompt, full, turn)
        self._splice(conversation, prompt, full, turn)
        self._parse(conversation, prompt, turn)
        self._truncated(conversation, turn)

    # -- prompts -----------------------------------------------------------------------------------------------------

    def _prompt(self, conversation: Conversation, prompt: str) -> None:
        self.counts["prompts"] += 1
        try:
            ids = self._called(
                "exception in render",
                conversation,
                lambda: self.product.render(conversation.history, conversation.tools),
            )
        except TemplateRefused as error:
            roles = {message["role"] for message in conversation.history} - {"tool", "assistant"}
            seen = {m["role"] for m in conversation.history if any(word in prompt for word in words_in(m))}
            if roles <= seen:
                self._found("false refusal of a prompt", conversation, str(error))
            return
        expected = self.reference.encode(prompt)
        if ids is not None and ids != expected.ids:
            at = next((n for n, (a, b) in enumerate(zip(ids, expected.ids, strict=False)) if a != b), None)
            around = prompt[expected.spans[at][0] :][:24] if at is not None else "the end"
            self._found(
                "prompt ids",
                conversation,
                f"{ids[at : at + 5] if at is not None else len(ids)} instead of "
                f"{expected.ids[at : at + 5] if at is not None else len(expected.ids)} at {around!r}",
            )

    def _forged(self, conversation: Conversation) -> None:
        self.counts["forged prompts"] += 1
        try:
            ids = self._called(
                "exception in render",
                conversation,
                lambda: self.product.render(conversation.history, conversation.tools),
            )
            harmless = self.reference.render(
                self.reference.neutral(conversation.history), self.reference.neutral(conversation.tools), generate=True
            )
        except TemplateRefused:
            return
        if ids is None:
            return
        expected = self.reference.control_counts(self.reference.encode(harmless).ids)
        if self.reference.control_counts(ids) != expected:
            self._found(
                "injection", conversation, f"{self.reference.control_counts(ids)} control tokens, expected {expected}"
            )

    # -- bridges -----------------------------------------------------------------------------------------------------

    def _appends(self, conversation: Conversation, prompt: str, with_reply: str, full: str, turn: SampledTurn) -> None:
        row = self.product.row(conversation.history, conversation.new, conversation.tools)
        if row is None or row.append_only == "no":
            return
        content = conversation.reply.get("content") or ""
        clean = content == content.strip() and bool(content or conversation.reply.get("tool_calls"))
        if row.append_only == "clean text" and not clean:
            return
        self.counts["claims of append-only"] += 1
        own = with_reply[len(prompt) : turn.turn_end] if with_reply.startswith(prompt) else ""
        problem = appends(self.reference, prompt, with_reply, full, own)
        if problem:
            self._found("false append-only", conversation, f"{row.name}: {problem}")

    def _before(self, conversation: Conversation) -> list[int]:
        """The ids of the prompt that the reply is sampled after."""
        return self.reference.encode(self.reference.render(conversation.history, conversation.tools, generate=True)).ids

    def _bridge(self, conversation: Conversation, prompt: str, full: str, turn: SampledTurn) -> None:
        expected = expected_tail(self.reference, conversation, full, turn, self.end_tokens)
        if not turn.stop and self.product.left_in_reasoning(prompt, turn.text):
            # The template shows the turn without the reasoning that its prompt opens. What was sampled is all of it
            # reasoning, cut short: it has no calls that could be answered, and it is closed first.
            self.counts["turns that do not close the reasoning that their prompt opens"] += 1
            self._after_any(conversation, turn.ids)
            return
        if expected is None:
            self.counts["not compared: the reply ends otherwise in the whole rendering"] += 1
            return
        try:
            strategy = self._called(
                "exception in choose",
                conversation,
                lambda: self.product.strategy(
                    conversation.history, conversation.reply, conversation.new, conversation.tools
                ),
            )
        except TemplateRefused as error:
            self._refused(conversation, full, turn, str(error))
            return
        if strategy is None:
            return
        self.counts[f"strategy {strategy}"] += 1
        if strategy == "fork":
            return
        history = conversation.history if strategy == "contextual" else None
        problem = self._bridge_differs(conversation, turn, expected, history)
        if problem.startswith("refused: "):
            self._refused(conversation, full, turn, problem)
        elif problem and self._leaves_out_what_is_repeated(conversation, full, turn, history):
            self.counts["bridges without content that the template repeats after results"] += 1
        elif (
            problem
            and strategy == "local"
            and not self._bridge_differs(conversation, turn, expected, conversation.history)
        ):
            self._found("false local", conversation, problem)
        elif problem:
            self._found(
                "bridge ids" if problem.startswith("ids ") else "wrong bridge", conversation, f"{strategy}: {problem}"
            )

    def _leaves_out_what_is_repeated(
        self, conversation: Conversation, full: str, turn: SampledTurn, history: Sequence[Message] | None
    ) -> bool:
        """Whether the bridge lacks only content that stands beside calls and is written again after their results.

        That is the policy of docs/decisions/0013: it was sampled in the turn, and the certificate does not say that
        such a continuation appends only.
        """
        content = conversation.reply.get("content")
        row = self.product.row(conversation.history, conversation.new, conversation.tools)
        if not content or not conversation.reply.get("tool_calls") or (row is not None and row.append_only != "no"):
            return False
        if not all(word in full[turn.full_end :] for word in words_in(content)):
            return False
        silent = replace(conversation, reply={**conversation.reply, "content": ""})
        written = self.reference.render([*silent.history, silent.reply, *silent.new], silent.tools, generate=True)
        end = end_of_reply(written, silent.reply, silent.new)
        if end is None:
            return False
        expected = expected_tail(self.reference, silent, written, replace(turn, full_end=end), self.end_tokens)
        return expected is not None and not self._bridge_differs(conversation, turn, expected, history)

    def _splice(self, conversation: Conversation, prompt: str, full: str, turn: SampledTurn) -> None:
        """A conversation rendered from the start, with the sampled ids in place of the reply."""
        messages = [*conversation.history, conversation.reply, *conversation.new]
        try:
            ids = self._called(
                "exception in splice",
                conversation,
                lambda: self.product.splice(messages, conversation.tools, {len(conversation.history): turn.ids}),
            )
        except TemplateRefused:
            return
        if ids is None:
            return
        if not turn.own:
            return
        self.counts["spliced"] += 1
        if not any(ids[n : n + len(turn.ids)] == turn.ids for n in range(len(ids) - len(turn.ids) + 1)):
            # No claim is false: nothing is spliced if turns can't be distinguished. It is counted.
            self.counts["spliced without the sampled ids"] += 1
        expected = expected_tail(self.reference, conversation, full, turn, self.end_tokens)
        whole, before = self.reference.encode(full).ids, self.reference.encode(prompt).ids
        if expected is not None and [*before, *turn.ids, *(expected[0][1] or [])] == whole != ids:
            self._found("splice ids", conversation, f"{self.reference.decode(ids)[-300:]!r} instead of {full[-300:]!r}")

    def _bridge_differs(
        self,
        conversation: Conversation,
        turn: SampledTurn,
        expected: Sequence[tuple[str, list[int] | None]],
        history: Sequence[Message] | None,
    ) -> str:
        """How the product's bridge differs from the expected one; empty if it does not."""
        try:
            ids = self.product.bridge(
                turn.ids, conversation.reply, conversation.new, conversation.tools, history, self._before(conversation)
            )
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

    def _refused(self, conversation: Conversation, full: str, turn: SampledTurn, reason: str) -> None:
        tail = full[turn.full_end :]
        if all(any(word in tail for word in words_in(message)[-1:]) for message in conversation.new):
            self._found("false refusal of a bridge", conversation, reason)

    # -- replies -----------------------------------------------------------------------------------------------------

    def _parse(self, conversation: Conversation, prompt: str, turn: SampledTurn) -> None:
        self.counts["replies parsed"] += 1
        try:
            reply = self.product.parse(turn.ids, conversation.tools, self._before(conversation))
            if (
                conversation.number % 3 == 0
                and self.product.parse(turn.ids, conversation.tools, self._before(conversation), step=1) != reply
            ):
                self._found("reply depends on how it is cut", conversation, turn.text)
        except Exception as error:
            self._found("exception in parser", conversation, f"{type(error).__name__}: {error}: {turn.text}")
            return
        if not turn.own or conversation.constant or not all(word in turn.text for word in words_in(conversation.reply)):
            return
        if self.reference.decode_whole(turn.ids).split() != turn.text.split():
            self.counts["not compared: tokenizers itself decodes the reply otherwise"] += 1
            return
        if self.product.left_in_reasoning(prompt, turn.text):
            self.counts["not compared: the turn does not close the reasoning that its prompt opens"] += 1
            return
        checks = checks_of(conversation.reply)
        if not self.product.parses(checks):
            self.counts["not compared: the certificate does not say that it is parsed"] += 1
            return
        exact = self.reference.decode_whole(turn.ids) == turn.text
        problem = reply_differs(
            conversation.reply, message_of(reply, conversation.reply), composed if exact else squeezed
        )
        if problem:
            self._found("false claim of parsing", conversation, f"{problem}; {turn.text[:160]!r}")

    def _truncated(self, conversation: Conversation, turn: SampledTurn) -> None:
        """Cut the turn at a random token: no exception, no lost message, and open parts are closed."""
        if len(turn.ids) < 3:
            return
        cut = turn.ids[: self.rng_of(f"cut {conversation.number}").randrange(1, len(turn.ids) - 1)]
        self.counts["truncated replies"] += 1
        self._after_any(conversation, cut)

    def _after_any(self, conversation: Conversation, cut: list[int]) -> None:
        """Continue after ids that are not a whole turn."""
        try:
            reply = self.product.parse(cut, conversation.tools, self._before(conversation))
        except Exception as error:
            self._found(
                "exception in parser", conversation, f"{type(error).__name__}: {error}: {self.reference.decode(cut)}"
            )
            return
        parsed = message_of(reply, conversation.reply)
        new: list[Message] = [{"role": "user", "content": "go on zqfollowup"}]
        if parsed.get("tool_calls"):
            return
        try:
            prompt = self.reference.render(conversation.history, conversation.tools, generate=True)
            full = self.reference.render([*conversation.history, parsed, *new], conversation.tools, generate=True)
            strategy = self.product.strategy(conversation.history, parsed, new, conversation.tools)
            if strategy == "fork":
                return
            history = conversation.history if strategy == "contextual" else None
            ids = self._called(
                "exception in bridge",
                conversation,
                lambda: self.product.bridge(cut, parsed, new, conversation.tools, history, self._before(conversation)),
            )
        except (Refused, TemplateRefused):
            return
        if ids is None:
            return
        text = self.reference.decode(ids)
        if "zqfollowup" in full and "zqfollowup" not in text:
            self._found(
                "message lost after a truncated reply", conversation, f"{text!r} after {self.reference.decode(cut)!r}"
            )
        content = (reply.reasoning if reply.reasoning_open else reply.content).strip()
        if reply.tool_calls or not content or full.count(content) != 1 or (reply.reasoning_open and reply.content):
            return
        if self.reference.spells_control(content):
            self.counts["not compared: content with a control token that the parser does not know"] += 1
            return
        without = self.reference.render(
            [*conversation.history, _with_other_text(parsed), *new], conversation.tools, generate=True
        )
        if content in without:
            return  # The template leaves the reply out, and writes the same itself.
        at = full.rindex(content)
        followed = full.rfind(new[0]["content"])
        if (
            at < max((full.rfind(word) for word in words_in(list(conversation.history))), default=0)
            or 0 <= followed <= at
        ):
            return  # The template omits the reply, and other messages have the same text.
        tail = full[at + len(content) :]
        sampled = self.reference.decode(cut)
        after = sampled.rpartition(content)[2] if content in sampled else ""
        stop = self.reference.first_control(after)
        if stop is not None and stop[0] + len(stop[1]) < len(after):
            return
        self.counts["bridges after truncated replies"] += 1
        # After a sampled stop comes what the template writes after that stop.
        expected = tail.partition(stop[1])[2] if stop is not None and stop[1] in tail else tail
        other = self.reference.first_control(tail) if stop is not None and expected == tail else None
        if other is not None and self.reference.added[stop[1]]["id"] in self.product.stop_ids(conversation.tools):
            # It ends the turn in place of the token that the template writes there, but is no next message's header.
            replaced = tail[other[0] + len(other[1]) :]
            expected = replaced if squeezed(text) == squeezed(replaced) else expected
        # What was sampled after the content may be its white space. Some tokens take along what follows them.
        again = self.reference.decode(self.reference.encode(expected).ids)
        lines = [rendering.partition("zqfollowup")[0].count("\n") for rendering in (text, expected, again)]
        exact = lines[0] in lines[1:] or not sampled.endswith(content)
        if squeezed(text) != squeezed(expected) or not exact:
            before = (prompt + sampled).rpartition(content)[0].rstrip()
            opening = [token for token in self.reference.controls if full[:at].rstrip().endswith(token)]
            if opening and not before.endswith(tuple(opening)):
                self.counts["not compared: content without what the template opens it with"] += 1
                return
            if reply.reasoning_open and self._lacks_only_a_frame(conversation, parsed, new, text, expected):
                self.counts["bridges after truncated reasoning without the frame of an empty content"] += 1
                return
            kind = "wrong bridge after a truncated reply"
            self._found(kind, conversation, f"{text!r} instead of {expected!r} after {sampled!r}")

    def _lacks_only_a_frame(
        self, conversation: Conversation, parsed: Message, new: Sequence[Message], text: str, expected: str
    ) -> bool:
        """Whether a bridge closes reasoning and ends the turn, but without the frame of an empty content in between.

        How a turn ends is what the template writes after a content that is not empty; without content some end none.
        """
        answered = {**parsed, "content": "say zqanswer"}
        full = self.reference.render([*conversation.history, answered, *new], conversation.tools, generate=True)
        after = full.rpartition("zqanswer")[2]
        ended = os.path.commonprefix([after[::-1], expected[::-1]])[::-1]
        close = self.reference.first_control(expected)
        if close is None:
            return False
        # Whitespace before it is the end of the completion.
        closed = expected[: close[0] + len(close[1])].lstrip()
        allowed = [closed + ended, closed + after, *([ended] if ended.lstrip().startswith(closed) else [])]
        return squeezed(text) in map(squeezed, allowed)

    # -- all conversations together ----------------------------------------------------------------------------------

    def _continuations(self, conversations: Sequence[Conversation], constants: Sequence[str]) -> None:
        """Compare what the certificate says of each continuation with whether its tail depends on the history."""
        rows: dict[str, tuple[Continuation, list[Conversation]]] = {}
        for own in conversations:
            row = self.product.row(own.history, own.new, own.tools)
            spelled = self.reference.spells_control([own.history, own.reply, own.new, own.tools])
            if row is not None and row.strategy != "refused" and answered(own) and not spelled:
                rows.setdefault(row.name, (row, []))[1].append(own)
        # A control token that a caller spells is text for the product, which the template does not see as it is.
        candidates = [*(c.history for c in conversations), *map(tuple, histories_with(constants))]
        histories = [history for history in candidates if not self.reference.spells_control(history)]
        for row, same in rows.values():
            needed = "/no-system" not in row.name if "/no-tools" in row.name else None
            chosen = [h for h in histories if needed in (None, _has_system(h))]
            chosen += AFTER_RESULTS if needed is None else []
            why = dependence(self.reference, same, chosen)
            # New messages that say what the template looks for may hide that it looks for it in the history too.
            silent = [
                conversation
                for conversation in same
                if not any(text in repr([conversation.reply, conversation.new]) for text in constants)
            ]
            if why == "" and len(silent) < len(same):
                why = dependence(self.reference, silent, chosen)
            if why == "" and silent and not needed:
                shortest = min(silent, key=lambda conversation: len(conversation.new))
                why = depends_on_constants(self.reference, shortest, constants, tools=needed is None)
            if why:
                self.counts["continuations that depend on the history"] += 1
                if row.strategy == "local":
                    self._found("false local", same[0], f"{row.name}: {why}")
            elif why is not None:
                self.counts[INDEPENDENT] += 1
                self.counts[LOCAL] += row.strategy == "local"
                if row.strategy != "local" and len(silent) >= ENOUGH and has_shortest(row.name, silent):
                    detail = f"{row.name}: the same tail after {len(chosen)} histories; {row.reason}"
                    self._found(f"needless {row.strategy}", same[0], detail)


def _with_other_text(message: Message) -> Message:
    """Return an assistant message with other words."""
    return {key: "zqother" if isinstance(value, str) and key != "role" else value for key, value in message.items()}


def _has_system(history: Sequence[Message]) -> bool:
    return any(message["role"] == "system" for message in history)
