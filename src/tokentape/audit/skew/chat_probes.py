"""Probes of conversations: whether renderings and loss masks are the same, and a server uses the prompt it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tokentape.audit.skew.causes import Cause, TextCauses
from tokentape.audit.skew.conversations import conversations
from tokentape.audit.skew.findings import Skew, SkewResult
from tokentape.audit.skew.shrink import smallest_conversation
from tokentape.audit.skew.sides.base import Rendering, Side, SkewChat
from tokentape.audit.skew.template_causes import TemplateCause, TemplateCauses
from tokentape.audit.skew.text_probes import outcome
from tokentape.errors import InvalidRequest, TemplateRefused, UnsupportedParameter

_MOST_EXAMINED = 16
_WHERE = 5
_ECHOED = 6
_MASKED = "Marks belong around what the model samples, and around nothing else: mask by the ids that were sampled."


@dataclass(slots=True)
class ChatFound:
    """What the probes of conversations found."""

    findings: list[Skew] = field(default_factory=list)
    tried: int = 0
    masks: int = 0
    left: int = 0
    """Conversations that differ and were not explained."""


@dataclass(slots=True)
class _Group:
    cause: TemplateCause
    example: SkewChat
    count: int = 0
    where: list[str] = field(default_factory=list)

    def add(self, conversation: SkewChat) -> None:
        self.count += 1
        if len(self.where) < _WHERE:
            self.where.append(conversation.name)


@dataclass(frozen=True, slots=True)
class _Refused:
    why: str


_Made = Rendering | _Refused


@dataclass(frozen=True, slots=True)
class _Differs:
    """A conversation that the sides render differently, and what each wrote; None: it refused."""

    conversation: SkewChat
    a: _Made
    b: _Made
    texts: tuple[str | None, str | None]

    def explained_by(self, cause: TemplateCause, encoding: Cause | None) -> bool:
        """Whether a cause of templates, or one of encoding what they wrote, alone makes for this difference."""
        if encoding is not None:
            known, wanted = (self.a, self.b) if encoding.gives == "b" else (self.b, self.a)
            if encoding.encoder is None or isinstance(known, _Refused) or isinstance(wanted, _Refused):
                return False
            return known.text is not None and encoding.encoder([known.text])[0] == wanted.ids
        one, other = self.texts
        if cause.explains is None or one is None or other is None:
            return False
        return cause.explains(self.conversation, one, other)


def chat_findings(a: Side, b: Side, causes: TextCauses, progress: Callable[[str], None]) -> ChatFound:
    """Render each conversation on both sides, and explain what differs."""
    found = ChatFound()
    compared = _Compared(a, b, causes)
    left: list[_Differs] = []
    masked: dict[str, Skew] = {}
    for conversation in conversations(_end_token(a, b)):
        try:
            one, other = _render(a, conversation), _render(b, conversation)
        except UnsupportedParameter:
            continue
        if isinstance(one, _Refused) and isinstance(other, _Refused):
            continue
        found.tried += 1
        if not _same(one, other):
            left.append(_Differs(conversation, one, other, compared.texts(one, other)))
        elif isinstance(one, Rendering) and isinstance(other, Rendering):
            found.masks += int(one.mask is not None or other.mask is not None)
            for finding in _mask_findings(a, b, conversation, one, other):
                masked.setdefault(finding.cause, finding)
    findings, found.left = compared.explained(left, progress)
    found.findings += findings
    found.findings += masked.values()
    if ("mask" in a.facts.abilities) != ("mask" in b.facts.abilities) and not _is_server(a) and not _is_server(b):
        found.findings.append(_marked_on_one_side(a, b))
    return found


def _marked_on_one_side(a: Side, b: Side) -> Skew:
    marks, lacks = ("A", "B") if "mask" in a.facts.abilities else ("B", "A")
    return Skew(
        kind="loss mask",
        probe="masks",
        cause=(
            f"only the template of {marks} marks what carries loss ({{% generation %}}); masks made from "
            f"that of {lacks} are all zeros or all ones, as the library's version has it"
        ),
        fix="Train with masks from recorded ids, or with the template that marks.",
        count=1,
        severity="caution",
    )


def _end_token(a: Side, b: Side) -> str | None:
    """A control token that both sides know, by preference the one that ends turns."""
    both = [content for content, token in a.facts.added.items() if token.special and content in b.facts.added]
    end = a.facts.special_tokens.get("eos_token")
    return end if end in both else next(iter(both), None)


def _is_server(side: Side) -> bool:
    return "server" in side.facts.kind


class _Compared:
    """Explains conversations that two sides render differently."""

    def __init__(self, a: Side, b: Side, causes: TextCauses) -> None:
        self._a, self._b = a, b
        self._texts = causes
        self._templates = TemplateCauses(a.facts, b.facts, datetime.now(UTC).date().isoformat(), self._texts_of)

    def explained(self, differing: Sequence[_Differs], progress: Callable[[str], None]) -> tuple[list[Skew], int]:
        """One finding per cause, and how many conversations were left unexplained because there were too many."""
        left = sorted(differing, key=lambda one: len(str(one.conversation.messages)) + len(str(one.conversation.tools)))
        groups: dict[str, _Group] = {}
        examined = 0
        while left and examined < _MOST_EXAMINED:
            first, left = left[0], left[1:]
            examined += 1
            progress(f"explaining renderings, {len(left)} left")
            small = smallest_conversation(first.conversation, self._alike(first))
            cause, encoding = self._cause(small)
            group = groups.setdefault(cause.key, _Group(cause, small))
            group.add(first.conversation)
            rest = []
            for one in left:
                if one.explained_by(cause, encoding):
                    group.add(one.conversation)
                else:
                    rest.append(one)
            left = rest
        return [self._finding(group) for group in groups.values()], len(left)

    def _alike(self, first: _Differs) -> Callable[[SkewChat], bool]:
        """Whether a smaller conversation differs in the same manner: by who refuses it, by text, or by ids alone."""
        manner = _manner(first.a, first.b)

        def differs(conversation: SkewChat) -> bool:
            if not conversation.messages:
                return False
            try:
                one, other = _render(self._a, conversation), _render(self._b, conversation)
            except UnsupportedParameter:
                return False
            return not _same(one, other) and _manner(one, other) == manner

        return differs

    def _cause(self, conversation: SkewChat) -> tuple[TemplateCause, Cause | None]:
        """The cause, and if it is one of encoding what both wrote alike, that one."""
        one, other = _render(self._a, conversation), _render(self._b, conversation)
        texts = self.texts(one, other)
        if isinstance(one, Rendering) and isinstance(other, Rendering) and self._written_alike(one, other, texts):
            spelling = self._spelling(conversation, one.ids, other.ids)
            if spelling is not None:
                return spelling, None
            cause = self._texts.cause_of(one.text or texts[0] or "", one.ids, other.ids)
            return TemplateCause(cause.kind, cause.what, cause.fix, f"text:{cause.key}"), cause
        return self._templates.cause_of(conversation, *texts), None

    def _written_alike(self, one: Rendering, other: Rendering, texts: tuple[str | None, str | None]) -> bool:
        """Whether both templates wrote the same, and only the encoding of it differs."""
        if one.text is not None and other.text is None:
            return self._b.encode([one.text])[0] == other.ids
        if other.text is not None and one.text is None:
            return self._a.encode([other.text])[0] == one.ids
        return texts[0] == texts[1]

    def _spelling(self, conversation: SkewChat, a_ids: list[int], b_ids: list[int]) -> TemplateCause | None:
        """The cause, if one side makes control tokens of what a message spells and the other does not."""
        said = str(conversation.messages)
        for content in {**self._a.facts.added, **self._b.facts.added}:
            one, other = self._a.facts.added.get(content), self._b.facts.added.get(content)
            if content not in said or one is None or one != other:
                continue
            counts = a_ids.count(one.id), b_ids.count(one.id)
            if counts[0] != counts[1]:
                who = "A" if counts[0] > counts[1] else "B"
                what = f"{who} makes control tokens of what messages spell, such as {content}; the other keeps it text"
                fix = "Never let text become control: encode messages without control tokens on both sides."
                return TemplateCause("control text", what, fix, f"control text:{who}")
        return None

    def _texts_of(self, conversation: SkewChat) -> tuple[str | None, str | None]:
        try:
            one, other = _render(self._a, conversation), _render(self._b, conversation)
        except UnsupportedParameter:
            return None, None
        return self.texts(one, other)

    def texts(self, one: _Made, other: _Made) -> tuple[str | None, str | None]:
        """What the sides wrote; None where one refused."""
        return self._text(self._a, self._b, one), self._text(self._b, self._a, other)

    def _text(self, side: Side, other: Side, made: _Made) -> str | None:
        """What a side wrote; read from its ids if it tells no more."""
        if isinstance(made, _Refused):
            return None
        if made.text is not None:
            return made.text
        if other.facts.spec is not None and max(made.ids, default=0) < (other.facts.vocab_size or 0):
            return other.decode([made.ids])[0]
        return side.decode([made.ids])[0]

    def _finding(self, group: _Group) -> Skew:
        cause = group.cause
        return Skew(
            kind=cause.kind,
            probe="render",
            cause=cause.what,
            fix=cause.fix,
            count=group.count,
            where=tuple(dict.fromkeys(group.where)),
            example=group.example,
            a=self._outcome(self._a, self._b, group.example),
            b=self._outcome(self._b, self._a, group.example),
            severity=cause.severity,
        )

    def _outcome(self, side: Side, other: Side, conversation: SkewChat) -> SkewResult:
        made = _render(side, conversation)
        if isinstance(made, _Refused):
            return SkewResult(refused=made.why)
        return outcome(side, made.ids, self._text(side, other, made))


def _render(side: Side, conversation: SkewChat) -> _Made:
    """Raises `UnsupportedParameter` for what the side can't be asked."""
    try:
        return side.render(conversation)
    except UnsupportedParameter:
        raise
    except (TemplateRefused, InvalidRequest) as error:
        return _Refused(str(error))


def _manner(one: _Made, other: _Made) -> str:
    """Whether one side refused, or the templates wrote other texts, as far as the sides tell, or only ids differ."""
    if isinstance(one, _Refused) or isinstance(other, _Refused):
        return "A refuses" if isinstance(one, _Refused) else "B refuses"
    return "text" if one.text != other.text and None not in (one.text, other.text) else "ids"


def _same(one: _Made, other: _Made) -> bool:
    if isinstance(one, _Refused) or isinstance(other, _Refused):
        return isinstance(one, _Refused) and isinstance(other, _Refused)
    return one.ids == other.ids


def _mask_findings(a: Side, b: Side, conversation: SkewChat, one: Rendering, other: Rendering) -> list[Skew]:
    found = []
    if one.mask is not None and other.mask is not None and one.mask != other.mask:
        found.append(_mask_finding("the sides mark other tokens of the same ids", a, b, conversation, one, other))
    for letter, side, made in (("A", a, one), ("B", b, other)):
        if made.mask is None:
            continue
        trained = side.decode([[i for i, kept in zip(made.ids, made.mask, strict=True) if kept]])[0]
        whole = side.decode([made.ids])[0]
        for word in ("questionword", "systemword", "resultword", "nextword"):
            if word in trained:
                cause = f"{letter} gives loss to what it did not sample: text of other roles"
                found.append(_mask_finding(cause, a, b, conversation, one, other))
                break
        if "answerword" in whole and "answerword" not in trained:
            cause = f"{letter} gives no loss to some of the assistant's own text"
            found.append(_mask_finding(cause, a, b, conversation, one, other))
    return found


def _mask_finding(cause: str, a: Side, b: Side, conversation: SkewChat, one: Rendering, other: Rendering) -> Skew:
    return Skew(
        kind="loss mask",
        probe="masks",
        cause=cause,
        fix=_MASKED,
        count=1,
        where=(conversation.name,),
        example=conversation,
        a=outcome(a, _trained(one), one.text),
        b=outcome(b, _trained(other), other.text),
    )


def _trained(made: Rendering) -> list[int]:
    return made.ids if made.mask is None else [i for i, kept in zip(made.ids, made.mask, strict=True) if kept]


def echo_findings(side: Side, letter: str) -> ChatFound | None:
    """Whether a server samples from the prompt that it says it renders; None if the side is none that tells."""
    from tokentape.audit.skew.sides.server import ServerSide

    if not isinstance(side, ServerSide) or not side.echoes:
        return None
    found = ChatFound()
    for conversation in conversations():
        if found.tried == _ECHOED:
            break
        if not conversation.generate:
            continue
        shown = _render(side, conversation)
        if isinstance(shown, _Refused):
            continue
        used = side.echo(conversation)
        if used is None:
            return None
        found.tried += 1
        if used != shown.ids and not found.findings:
            found.findings.append(
                Skew(
                    "server",
                    "echo",
                    f"{letter} samples from another prompt than its /tokenize renders",
                    "Compare with the prompt_token_ids of its replies, not with /tokenize.",
                    1,
                    (conversation.name,),
                    conversation,
                    outcome(side, shown.ids),
                    outcome(side, used),
                )
            )
    return found
