"""Compare how backends render conversations: ids, loss masks, and the prompts that servers render and sample from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice

from tokentape.audit._skew.backends import Backend, BackendFacts, Rendering, SkewChat
from tokentape.audit._skew.battery import conversations, template_conversations
from tokentape.audit._skew.causes import TextCauses
from tokentape.audit._skew.findings import Cause, Skew, SkewResult
from tokentape.audit._skew.probing import explain, result, smallest_conversation
from tokentape.audit._skew.template_causes import PIN_DATE, TemplateCauses, template_writer
from tokentape.errors import InvalidRequest, TemplateRefused, UnsupportedParameter
from tokentape.types import Message

_MOST_EXAMINED = 16
_ECHOED = 6
_TWICE = 8
_DAYS = ("2001-02-03", "2033-10-27")
_MASKED = "Mark exactly what the model samples, and nothing else: make the mask from the sampled ids."


@dataclass(frozen=True, slots=True)
class _Outcomes:
    """A conversation with each backend's rendering or refusal."""

    conversation: SkewChat
    a: Rendering
    b: Rendering

    @property
    def size(self) -> int:
        return len(str(self.conversation.messages)) + len(str(self.conversation.tools))

    @property
    def refused(self) -> bool:
        return self.a.refused is not None or self.b.refused is not None

    @property
    def differ(self) -> bool:
        return self.a.ids != self.b.ids or (self.a.refused is None) != (self.b.refused is None)

    @property
    def manner(self) -> str:
        """`A refuses` or `B refuses`; else `text` if the templates are known to write different texts, else `ids`."""
        if self.refused:
            return "B refuses" if self.a.refused is None else "A refuses"
        return "text" if self.a.text != self.b.text and None not in (self.a.text, self.b.text) else "ids"


class ChatProbe:
    """Renders conversations with two backends, and explains differences."""

    def __init__(self, a: Backend, b: Backend, causes: TextCauses) -> None:
        self._a, self._b = a, b
        self._sides = (("A", a), ("B", b))
        self._text_causes = causes
        date = a.facts.date or b.facts.date or datetime.now(UTC).date().isoformat()
        self._templates = TemplateCauses(a.facts, b.facts, date, self._write)
        self.findings: list[Skew] = []
        self.left = 0
        """The number of differences that were not explained."""
        self.counts: Counter[str] = Counter()
        """Inputs that were compared, by probe, and the user's conversations among them (`own`, `own differing`).

        Also the largest numbers of `messages` and `tools` in a conversation.
        """

    def compare(self, progress: Callable[[str], None], own: Sequence[SkewChat] = ()) -> None:
        """Render the built-in and the user's `own` conversations with both backends, and explain the differences."""
        self.counts["render"] = 0
        self.findings += self._unstable()
        if any(finding.severity == "skew" for finding in self.findings):
            return
        differing: list[_Outcomes] = []
        masked: dict[str, Skew] = {}
        sources = [side.facts.template for _, side in self._sides if side.facts.template is not None]
        built_in = ((chat, 0) for chat in (*conversations(self._end_token()), *template_conversations(sources)))
        for conversation, users in (*built_in, *((chat, 1) for chat in own)):
            outcomes = self._rendered(conversation)
            if outcomes is None or (outcomes.refused and not outcomes.differ):
                continue
            self.counts.update({"render": 1, "own": users})
            for what, parts in (("messages", conversation.messages), ("tools", conversation.tools)):
                self.counts[what] = max(self.counts[what], len(parts))
            if outcomes.differ:
                self.counts["own differing"] += users
                differing.append(outcomes)
                continue
            self._templates.agreed.append(conversation)
            if outcomes.a.mask is not None or outcomes.b.mask is not None:
                self.counts["masks"] += 1
            for cause in self._mask_causes(outcomes):
                results = (
                    result(self._a, _trained(outcomes.a), outcomes.a.text),
                    result(self._b, _trained(outcomes.b), outcomes.b.text),
                )
                finding = Skew("loss mask", "masks", cause, _MASKED, 1, (conversation.name,), conversation, *results)
                masked.setdefault(cause, finding)
        differing.sort(key=lambda case: case.size)
        inputs = [(case.conversation.name, case) for case in differing]
        findings, self.left = explain(inputs, _MOST_EXAMINED, self._examine, progress)
        if len(differing) == self.counts["render"] and all(case.refused for case in differing):
            findings = [replace(finding, severity="skew") for finding in findings]  # nothing renders on both sides
        self.findings += [*findings, *masked.values()]
        marks = ["mask" in side.facts.abilities for _, side in self._sides]
        if marks[0] != marks[1] and not (self._a.is_server or self._b.is_server):
            who, lacks = ("A", "B") if marks[0] else ("B", "A")
            cause = (
                f"only {who}'s template marks the tokens that carry loss ({{% generation %}}); masks made with the "
                f"template of {lacks} are all zeros or all ones, depending on the library's version"
            )
            fix = "Train with masks from recorded ids, or with the template that marks them."
            self.findings.append(Skew("loss mask", "masks", cause, fix, 1, severity="caution"))

    def compare_echoes(self) -> None:
        """Compare the prompts that servers sample from with those that they render."""
        for letter, server in ((letter, side) for letter, side in self._sides if side.echoes):
            chats = (chat for chat in conversations() if chat.generate)
            rendered = ((chat, shown) for chat in chats if (shown := _render(server, chat)) and shown.refused is None)
            echoes = [(chat, shown, server.echo(chat)) for chat, shown in islice(rendered, _ECHOED)]
            reported = [(chat, shown.ids, used) for chat, shown, used in echoes if used is not None]
            if len(reported) < len(echoes):
                reported = []  # it does not report every prompt
            self.counts["echo"] += len(reported)
            for chat, ids, used in [echo for echo in reported if echo[1] != echo[2]][:1]:
                cause = f"{letter} samples from a different prompt than its /tokenize renders"
                fix = "Compare with the prompt_token_ids in its replies, not with /tokenize."
                results = result(server, ids), result(server, used)
                self.findings.append(Skew("server", "echo", cause, fix, 1, (chat.name,), chat, *results))

    def _unstable(self) -> Iterator[Skew]:
        """Yield findings on sides that render differently a second time, on a different day, or with the answer."""
        for letter, side in self._sides:
            for conversation in islice(conversations(), _TWICE):
                once, again = (_render(side, conversation) for _ in range(2))
                if once and again and once.refused is again.refused is None and once.ids != again.ids:
                    what = (
                        f"{letter} disagrees with itself: it renders the same conversation differently the second time"
                    )
                    fix = "Remove random values and the time of day from the template."
                    results = result(side, once.ids, once.text), result(side, again.ids, again.text)
                    yield Skew("template", "render", what, fix, 1, (conversation.name,), conversation, *results)
                    break
        if dated := [letter for letter, side in self._sides if _shows_date(side.facts)]:
            what = f"the template of {' and '.join(dated)} uses today's date: prompts may differ on another day"
            yield Skew("date", "render", what, PIN_DATE, 1, severity="caution")
        if apart := [letter for letter, side in self._sides if _prompt_is_no_prefix(side)]:
            what = f"in {' and '.join(apart)}, a prompt is not a prefix of the same conversation with its answer"
            fix = "Train on recorded ids: masks made from the prompt's length begin at the wrong token."
            yield Skew("generation prompt", "render", what, fix, 1, severity="caution")

    def _end_token(self) -> str | None:
        """Return a control token that both backends know, preferably the token that ends turns."""
        a, b = self._a.facts, self._b.facts
        shared = [content for content, token in a.added.items() if token.special and content in b.added]
        end = a.special_tokens.get("eos_token")
        return end if end in shared else next(iter(shared), None)

    def _mask_causes(self, outcomes: _Outcomes) -> Iterator[str]:
        a_mask, b_mask = outcomes.a.mask, outcomes.b.mask
        if a_mask is not None and b_mask is not None and a_mask != b_mask:
            yield "the sides mark different tokens in the same ids"
        for (letter, backend), rendering in zip(self._sides, (outcomes.a, outcomes.b), strict=True):
            if rendering.mask is None:
                continue
            trained, whole = backend.decode([_trained(rendering), rendering.ids])
            if any(word in trained for word in ("questionword", "systemword", "resultword", "nextword")):
                yield f"{letter} marks other roles' text, which no model sampled, as carrying loss"
            if "answerword" in whole and "answerword" not in trained:
                yield f"{letter} does not mark some of the assistant's own text as carrying loss"

    def _rendered(self, conversation: SkewChat) -> _Outcomes | None:
        """Render a conversation with both backends. Return None if either does not support such a request."""
        a = _render(self._a, conversation)
        b = None if a is None else _render(self._b, conversation)
        return None if a is None or b is None else _Outcomes(conversation, a, b)

    def _examine(self, first: _Outcomes) -> tuple[str, Skew, Callable[[list[_Outcomes]], Sequence[bool]]]:
        manner = first.manner

        def differs(conversation: SkewChat) -> bool:
            outcomes = self._rendered(conversation) if conversation.messages else None
            return outcomes is not None and outcomes.differ and outcomes.manner == manner

        small = smallest_conversation(first.conversation, differs)
        outcomes = self._rendered(small)
        assert outcomes is not None
        cause, texts = self._cause(outcomes), self._texts(outcomes)
        results = _result(self._a, outcomes.a, texts[0]), _result(self._b, outcomes.b, texts[1])
        finding = Skew(cause.kind, "render", cause.what, cause.fix, 1, (), small, *results, cause.severity)
        return cause.key, finding, lambda others: [self._explains(cause, case) for case in others]

    def _explains(self, cause: Cause, outcomes: _Outcomes) -> bool:
        """Return True if the cause alone also explains these outcomes, by rendered text or by its encoding."""
        if cause.encoder is not None:
            source, target = (outcomes.a, outcomes.b) if cause.gives == "b" else (outcomes.b, outcomes.a)
            known = source.text is not None and target.refused is None
            return known and cause.encoder([source.text or ""])[0] == target.ids
        if cause.explains is None:
            return False
        ours, theirs = self._texts(outcomes)
        return ours is not None and theirs is not None and cause.explains(outcomes.conversation, ours, theirs)

    def _cause(self, outcomes: _Outcomes) -> Cause:
        texts = self._texts(outcomes)
        text = None if outcomes.refused else self._same_text(outcomes, texts)
        if text is None:
            return self._templates.cause_of(outcomes.conversation, *texts)
        a_ids, b_ids = outcomes.a.ids, outcomes.b.ids
        if (spelling := self._spelling(outcomes.conversation, a_ids, b_ids)) is not None:
            return spelling
        cause = self._text_causes.cause_of(text, a_ids, b_ids)
        return Cause(cause.kind, cause.what, cause.fix, f"text:{cause.key}", cause.encoder, cause.gives)

    def _same_text(self, outcomes: _Outcomes, texts: tuple[str | None, str | None]) -> str | None:
        """Return the text that both templates wrote. Return None if they wrote different texts."""
        a, b = outcomes.a, outcomes.b
        if a.text is not None and b.text is not None:
            return a.text if a.text == b.text else None
        for text in filter(None, texts):
            if self._a.encode([text])[0] == a.ids and self._b.encode([text])[0] == b.ids:
                return text
        return texts[0] if texts[0] == texts[1] else None

    def _spelling(self, conversation: SkewChat, a_ids: list[int], b_ids: list[int]) -> Cause | None:
        """Return the cause if only one backend turns letters of a message into a control token."""
        text = str(conversation.messages)
        for content, token in self._a.facts.added.items():
            counts = a_ids.count(token.id), b_ids.count(token.id)
            if content in text and token == self._b.facts.added.get(content) and counts[0] != counts[1]:
                who = "A" if counts[0] > counts[1] else "B"
                what = f"{who} turns message text into control tokens, such as {content}; the other side does not"
                fix = "Never let text become control tokens: encode message text without them on both sides."
                return Cause("control text", what, fix, f"control text:{who}")
        return None

    def _write(self, conversation: SkewChat) -> tuple[str | None, str | None]:
        outcomes = self._rendered(conversation)
        return (None, None) if outcomes is None else self._texts(outcomes)

    def _texts(self, outcomes: _Outcomes) -> tuple[str | None, str | None]:
        """Return the text that each backend rendered, decoded if it returns only ids; None if it refused."""

        def text(own: Backend, other: Backend, rendering: Rendering) -> str | None:
            if rendering.refused is not None or rendering.text is not None:
                return rendering.text
            decodable = other.facts.spec is not None and max(rendering.ids, default=0) < (other.facts.vocab_size or 0)
            return (other if decodable else own).decode([rendering.ids])[0]

        return text(self._a, self._b, outcomes.a), text(self._b, self._a, outcomes.b)


def _prompt_is_no_prefix(side: Backend) -> bool:
    """Return True if the prompt for a question is not a prefix of the question rendered with its answer."""
    question: tuple[Message, ...] = ({"role": "user", "content": "What is a questionword?"},)
    answered = (*question, {"role": "assistant", "content": "An answerword."})
    prompt, whole = _render(side, SkewChat(question)), _render(side, SkewChat(answered, generate=False))
    if prompt is None or whole is None or prompt.refused is not None or whole.refused is not None:
        return False
    return whole.ids[: len(prompt.ids)] != prompt.ids


def _shows_date(facts: BackendFacts) -> bool:
    """Return True if renderings depend on today's date although none was set."""
    if facts.template is None or facts.date is not None:
        return False
    writers = [template_writer(facts.template, facts.template_variables, date) for date in _DAYS]
    chats = islice(conversations(), _TWICE)
    return all(writers) and any(len({writer(chat) for writer in writers if writer}) > 1 for chat in chats)


def _render(backend: Backend, conversation: SkewChat) -> Rendering | None:
    """Render a conversation, or return its refusal. Return None if the backend doesn't support the request."""
    try:
        return backend.render(conversation)
    except UnsupportedParameter:
        return None
    except (TemplateRefused, InvalidRequest) as error:
        return Rendering([], None, refused=str(error))


def _result(backend: Backend, rendering: Rendering, text: str | None) -> SkewResult:
    refused = rendering.refused
    return result(backend, rendering.ids, text) if refused is None else SkewResult(refused=refused)


def _trained(rendering: Rendering) -> list[int]:
    if rendering.mask is None:
        return rendering.ids
    return [i for i, trained in zip(rendering.ids, rendering.mask, strict=True) if trained]
