"""Compare how backends render conversations: ids, loss masks, and the prompts that servers render and sample from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(slots=True)
class ChatFound:
    """The result of comparing conversations: findings, unexplained differences, and counts.

    The counts are of conversations by kind, and the largest numbers of messages and of tools in one.
    """

    findings: list[Skew] = field(default_factory=list)
    left: int = 0
    counts: Counter[str] = field(default_factory=Counter)


_Outcome = Rendering | SkewResult
"""A rendering, or a result that contains the reason for the refusal."""


@dataclass(frozen=True, slots=True)
class _Outcomes:
    """A conversation with each backend's outcome."""

    conversation: SkewChat
    a: _Outcome
    b: _Outcome

    @property
    def size(self) -> int:
        return len(str(self.conversation.messages)) + len(str(self.conversation.tools))

    @property
    def manner(self) -> str:
        """`A refuses` or `B refuses`; else `text` if the templates are known to write different texts, else `ids`."""
        for who, outcome in (("A refuses", self.a), ("B refuses", self.b)):
            if isinstance(outcome, SkewResult):
                return who
        texts = [outcome.text for outcome in (self.a, self.b) if isinstance(outcome, Rendering)]
        return "text" if texts[0] != texts[1] and None not in texts else "ids"


def chat_findings(
    a: Backend, b: Backend, causes: TextCauses, progress: Callable[[str], None], own: Sequence[SkewChat] = ()
) -> ChatFound:
    """Render the built-in and the user's `own` conversations with both backends, and explain the differences."""
    report = ChatFound(findings=[*_unstable_renderings(a, b)])
    if any(finding.severity == "skew" for finding in report.findings):
        return report
    compared = _ChatComparer(a, b, causes)
    differing: list[_Outcomes] = []
    masked: dict[str, Skew] = {}
    sources = [side.facts.template for side in (a, b) if side.facts.template is not None]
    built_in = ((chat, 0) for chat in (*conversations(_end_token(a, b)), *template_conversations(sources)))
    for conversation, users in (*built_in, *((chat, 1) for chat in own)):
        outcomes = compared.rendered(conversation)
        if outcomes is None or (isinstance(outcomes.a, SkewResult) and isinstance(outcomes.b, SkewResult)):
            continue
        report.counts.update({"render": 1, "own": users})
        for what, parts in (("messages", conversation.messages), ("tools", conversation.tools)):
            report.counts[what] = max(report.counts[what], len(parts))
        a_side, b_side = outcomes.a, outcomes.b
        if not isinstance(a_side, Rendering) or not isinstance(b_side, Rendering) or a_side.ids != b_side.ids:
            report.counts["own differing"] += users
            differing.append(outcomes)
            continue
        compared.agrees(conversation)
        report.counts["masks"] += a_side.mask is not None or b_side.mask is not None
        for cause in _mask_causes(a, b, a_side, b_side):
            results = result(a, _trained(a_side), a_side.text), result(b, _trained(b_side), b_side.text)
            finding = Skew("loss mask", "masks", cause, _MASKED, 1, (conversation.name,), conversation, *results)
            masked.setdefault(cause, finding)
    differing.sort(key=lambda case: case.size)
    inputs = [(case.conversation.name, case) for case in differing]
    findings, report.left = explain(inputs, _MOST_EXAMINED, compared.examine, progress)
    if len(differing) == report.counts["render"] and {case.manner for case in differing} <= {"A refuses", "B refuses"}:
        findings = [replace(finding, severity="skew") for finding in findings]  # no conversation renders on both sides
    report.findings += [*findings, *masked.values()]
    marks = [("mask" in side.facts.abilities) for side in (a, b)]
    if marks[0] != marks[1] and not (a.is_server or b.is_server):
        who, lacks = ("A", "B") if marks[0] else ("B", "A")
        cause = (
            f"only {who}'s template marks the tokens that carry loss ({{% generation %}}); masks made with the "
            f"template of {lacks} are all zeros or all ones, depending on the library's version"
        )
        fix = "Train with masks from recorded ids, or with the template that marks them."
        report.findings.append(Skew("loss mask", "masks", cause, fix, 1, severity="caution"))
    return report


def _unstable_renderings(a: Backend, b: Backend) -> Iterator[Skew]:
    """Yield findings on sides that render differently a second time, on a different day, or with the answer."""
    dated = []
    for letter, side in (("A", a), ("B", b)):
        for conversation in islice(conversations(), _TWICE):
            once, again = (_render(side, conversation) for _ in range(2))
            if isinstance(once, Rendering) and isinstance(again, Rendering) and once.ids != again.ids:
                what = f"{letter} disagrees with itself: it renders the same conversation differently the second time"
                fix = "Remove random values and the time of day from the template."
                results = result(side, once.ids, once.text), result(side, again.ids, again.text)
                yield Skew("template", "render", what, fix, 1, (conversation.name,), conversation, *results)
                break
        if side.facts.template is not None and side.facts.date is None and _shows_date(side.facts):
            dated.append(letter)
    if dated:
        what = f"the template of {' and '.join(dated)} shows today's date: prompts will differ tomorrow"
        yield Skew("date", "render", what, PIN_DATE, 1, severity="caution")
    apart = [letter for letter, side in (("A", a), ("B", b)) if _prompt_is_no_prefix(side)]
    if apart:
        what = f"in {' and '.join(apart)}, a prompt is not a prefix of the same conversation with its answer"
        fix = "Train on recorded ids: masks made from the prompt's length begin at the wrong token."
        yield Skew("generation prompt", "render", what, fix, 1, severity="caution")


def _prompt_is_no_prefix(side: Backend) -> bool:
    """Return True if the prompt for a question is not a prefix of the question rendered with its answer."""
    question: tuple[Message, ...] = ({"role": "user", "content": "What is a questionword?"},)
    answered = (*question, {"role": "assistant", "content": "An answerword."})
    prompt, whole = _render(side, SkewChat(question)), _render(side, SkewChat(answered, generate=False))
    rendered = isinstance(prompt, Rendering) and isinstance(whole, Rendering)
    return rendered and whole.ids[: len(prompt.ids)] != prompt.ids  # type: ignore[union-attr]


def _shows_date(facts: BackendFacts) -> bool:
    writers = [template_writer(facts.template or "", facts.template_variables, date) for date in _DAYS]
    chats = islice(conversations(), _TWICE)
    return all(writers) and any(len({writer(chat) for writer in writers if writer}) > 1 for chat in chats)


def _end_token(a: Backend, b: Backend) -> str | None:
    """Return a control token that both backends know, preferably the token that ends turns."""
    shared = [content for content, token in a.facts.added.items() if token.special and content in b.facts.added]
    end = a.facts.special_tokens.get("eos_token")
    return end if end in shared else next(iter(shared), None)


class _ChatComparer:
    """Renders conversations with two backends, and explains differences."""

    def __init__(self, a: Backend, b: Backend, causes: TextCauses) -> None:
        self._a, self._b = a, b
        self._text_causes = causes
        date = a.facts.date or b.facts.date or datetime.now(UTC).date().isoformat()
        self._templates = TemplateCauses(a.facts, b.facts, date, self._write)

    def agrees(self, conversation: SkewChat) -> None:
        """Remember a conversation that both backends render equally: a cause must not change it."""
        self._templates.agreed.append(conversation)

    def rendered(self, conversation: SkewChat) -> _Outcomes | None:
        """Render a conversation with both backends. Return None if either does not support such a request."""
        a = _render(self._a, conversation)
        b = None if a is None else _render(self._b, conversation)
        return None if a is None or b is None else _Outcomes(conversation, a, b)

    def examine(self, first: _Outcomes) -> tuple[str, Skew, Callable[[list[_Outcomes]], Sequence[bool]]]:
        manner = first.manner

        def differs(conversation: SkewChat) -> bool:
            outcomes = self.rendered(conversation) if conversation.messages else None
            if outcomes is None or outcomes.manner != manner:
                return False
            if isinstance(outcomes.a, Rendering) and isinstance(outcomes.b, Rendering):
                return outcomes.a.ids != outcomes.b.ids
            return isinstance(outcomes.a, Rendering) or isinstance(outcomes.b, Rendering)

        small = smallest_conversation(first.conversation, differs)
        outcomes = self.rendered(small)
        assert outcomes is not None
        cause = self._cause(outcomes)
        results = self._result(self._a, self._b, outcomes.a), self._result(self._b, self._a, outcomes.b)
        finding = Skew(cause.kind, "render", cause.what, cause.fix, 1, (), small, *results, cause.severity)
        return cause.key, finding, lambda others: [self._explains(cause, case) for case in others]

    def _explains(self, cause: Cause, outcomes: _Outcomes) -> bool:
        """Return True if the cause alone also explains these outcomes, by rendered text or by its encoding."""
        if cause.encoder is not None:
            source, target = (outcomes.a, outcomes.b) if cause.gives == "b" else (outcomes.b, outcomes.a)
            if isinstance(source, SkewResult) or isinstance(target, SkewResult) or source.text is None:
                return False
            return cause.encoder([source.text])[0] == target.ids
        if cause.explains is None:
            return False
        ours, theirs = self._texts(outcomes)
        return ours is not None and theirs is not None and cause.explains(outcomes.conversation, ours, theirs)

    def _cause(self, outcomes: _Outcomes) -> Cause:
        a, b, texts = outcomes.a, outcomes.b, self._texts(outcomes)
        if isinstance(a, SkewResult) or isinstance(b, SkewResult):
            return self._templates.cause_of(outcomes.conversation, *texts)
        text = self._same_text(a, b, texts)
        if text is None:
            return self._templates.cause_of(outcomes.conversation, *texts)
        spelling = self._spelling(outcomes.conversation, a.ids, b.ids)
        if spelling is not None:
            return spelling
        cause = self._text_causes.cause_of(text, a.ids, b.ids)
        return Cause(cause.kind, cause.what, cause.fix, f"text:{cause.key}", cause.encoder, cause.gives)

    def _same_text(self, a: Rendering, b: Rendering, texts: tuple[str | None, str | None]) -> str | None:
        """Return the text that both templates wrote. Return None if they wrote different texts."""
        if a.text is not None and b.text is not None:
            return a.text if a.text == b.text else None
        if a.text is not None:
            return a.text if self._b.encode([a.text])[0] == b.ids else None
        if b.text is not None:
            return b.text if self._a.encode([b.text])[0] == a.ids else None
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
        outcomes = self.rendered(conversation)
        return (None, None) if outcomes is None else self._texts(outcomes)

    def _texts(self, outcomes: _Outcomes) -> tuple[str | None, str | None]:
        return self._text(self._a, self._b, outcomes.a), self._text(self._b, self._a, outcomes.b)

    def _text(self, backend: Backend, other: Backend, outcome: _Outcome) -> str | None:
        """Return the text that a backend rendered, decoded if it returns only ids; None if it refused."""
        if isinstance(outcome, SkewResult) or outcome.text is not None:
            return None if isinstance(outcome, SkewResult) else outcome.text
        decodable = other.facts.spec is not None and max(outcome.ids, default=0) < (other.facts.vocab_size or 0)
        return (other if decodable else backend).decode([outcome.ids])[0]

    def _result(self, backend: Backend, other: Backend, outcome: _Outcome) -> SkewResult:
        if isinstance(outcome, SkewResult):
            return outcome
        return result(backend, outcome.ids, self._text(backend, other, outcome))


def _render(backend: Backend, conversation: SkewChat) -> _Outcome | None:
    """Render a conversation, or return its refusal. Return None if the backend doesn't support the request."""
    try:
        return backend.render(conversation)
    except UnsupportedParameter:
        return None
    except (TemplateRefused, InvalidRequest) as error:
        return SkewResult(refused=str(error))


def _mask_causes(a: Backend, b: Backend, a_rendering: Rendering, b_rendering: Rendering) -> Iterator[str]:
    if a_rendering.mask is not None and b_rendering.mask is not None and a_rendering.mask != b_rendering.mask:
        yield "the sides mark different tokens in the same ids"
    for letter, backend, rendering in (("A", a, a_rendering), ("B", b, b_rendering)):
        if rendering.mask is None:
            continue
        trained, whole = backend.decode([_trained(rendering), rendering.ids])
        if any(word in trained for word in ("questionword", "systemword", "resultword", "nextword")):
            yield f"{letter} marks other roles' text, which no model sampled, as carrying loss"
        if "answerword" in whole and "answerword" not in trained:
            yield f"{letter} does not mark some of the assistant's own text as carrying loss"


def _trained(rendering: Rendering) -> list[int]:
    if rendering.mask is None:
        return rendering.ids
    return [i for i, trained in zip(rendering.ids, rendering.mask, strict=True) if trained]


def echo_findings(backend: Backend, letter: str) -> tuple[int, list[Skew]]:
    """Compare the prompts that a server samples from with those that it renders. Return their number, and findings."""
    tried, findings = 0, list[Skew]()
    for conversation in filter(lambda chat: chat.generate, conversations()):
        if tried == _ECHOED:
            break
        shown = _render(backend, conversation)
        if not isinstance(shown, Rendering):
            continue
        used = backend.echo(conversation)
        if used is None:
            return 0, []
        tried += 1
        if used != shown.ids and not findings:
            cause = f"{letter} samples from a different prompt than its /tokenize renders"
            fix = "Compare with the prompt_token_ids in its replies, not with /tokenize."
            results = result(backend, shown.ids), result(backend, used)
            findings.append(Skew("server", "echo", cause, fix, 1, (conversation.name,), conversation, *results))
    return tried, findings
