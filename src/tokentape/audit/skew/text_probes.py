"""Probes of texts: whether both sides give the same ids, with BOS and EOS too, and the same text back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tokentape.audit.skew.causes import LOAD_THE_FILE, SAME_FILES, Cause, TextCauses, brief
from tokentape.audit.skew.findings import Kind, Probe, Skew, SkewResult
from tokentape.audit.skew.shrink import smallest, smallest_text
from tokentape.audit.skew.sides.base import Side
from tokentape.audit.skew.spec_parts import part_of
from tokentape.errors import InvalidRequest

MOST_EXAMINED = 60
"""How many differing inputs of one probe are shrunk and explained; what they explain is counted without."""

_WHERE = 5
_CLEAN_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


@dataclass(frozen=True, slots=True)
class Differing:
    """A text that the sides encode differently."""

    text: str
    where: str
    """Its group in the battery, or its file."""
    a_ids: list[int]
    b_ids: list[int]


@dataclass(slots=True)
class _Found:
    cause: Cause
    example: str
    a_ids: list[int]
    b_ids: list[int]
    count: int = 0
    where: list[str] = field(default_factory=list)

    def add(self, where: str) -> None:
        self.count += 1
        if where not in self.where and len(self.where) < _WHERE:
            self.where.append(where)


def compare_texts(a: Side, b: Side, texts: Mapping[str, str], *, special: bool = False) -> list[Differing]:
    """The texts, with their groups, whose ids are not the same."""
    asked = list(texts)
    both = zip(asked, a.encode(asked, special=special), b.encode(asked, special=special), strict=True)
    return [Differing(text, texts[text], one, other) for text, one, other in both if one != other]


def explain_texts(
    a: Side,
    b: Side,
    causes: TextCauses,
    differing: Iterable[Differing],
    probe: Probe,
    progress: Callable[[str], None] = lambda _: None,
    *,
    special: bool = False,
) -> tuple[list[Skew], int]:
    """One finding per cause, and how many texts were left unexplained because there were too many."""
    left = sorted(differing, key=lambda one: len(one.text))
    found: dict[str, _Found] = {}
    examined = 0
    while left and examined < MOST_EXAMINED:
        first, left = left[0], left[1:]
        examined += 1
        progress(f"explaining differences, {len(left)} left")
        small = smallest_text(first.text, lambda text: _differs(a, b, text, special=special))
        a_ids, b_ids = a.encode([small], special=special)[0], b.encode([small], special=special)[0]
        cause = causes.cause_of(small, a_ids, b_ids, special=special)
        group = found.setdefault(cause.key, _Found(cause, small, a_ids, b_ids))
        group.add(first.where)
        if cause.encoder is not None:
            explained = cause.encoder([one.text for one in left])
            rest = []
            for one, ids in zip(left, explained, strict=True):
                if ids == (one.b_ids if cause.gives == "b" else one.a_ids):
                    group.add(one.where)
                else:
                    rest.append(one)
            left = rest
    return [_finding(a, b, one, probe) for one in found.values()], len(left)


def _differs(a: Side, b: Side, text: str, *, special: bool) -> bool:
    try:
        return a.encode([text], special=special) != b.encode([text], special=special)
    except InvalidRequest:
        return False


def _finding(a: Side, b: Side, found: _Found, probe: Probe) -> Skew:
    return Skew(
        kind=found.cause.kind,
        probe=probe,
        cause=found.cause.what,
        fix=found.cause.fix,
        count=found.count,
        where=tuple(found.where),
        example=found.example,
        a=outcome(a, found.a_ids),
        b=outcome(b, found.b_ids),
    )


def outcome(side: Side, ids: Sequence[int], text: str | None = None) -> SkewResult:
    """What a side made of an input, with its tokens where it can write each."""
    tokens = [side.token(one) for one in ids]
    said = tuple(token for token in tokens if token is not None)
    return SkewResult(tuple(ids), said if len(said) == len(ids) else (), text)


def special_texts(a: Side, b: Side) -> dict[str, str]:
    """Texts for BOS and EOS: short ones, and ones that begin or end with such a token already."""
    texts = ["a", "a b", "", "\n"]
    for side in (a, b):
        for name in ("bos_token", "eos_token"):
            token = side.facts.special_tokens.get(name)
            if token:
                texts += [f"{token}a", f"a{token}"]
    return dict.fromkeys(texts, "BOS and EOS")


def decode_findings(a: Side, b: Side, sequences: Mapping[tuple[int, ...], str]) -> list[Skew]:
    """Ids that the sides turn into different texts, one finding per way in which they do."""
    asked = list(sequences)
    found: dict[str, Skew] = {}
    both = zip(asked, a.decode(asked), b.decode(asked), strict=True)
    differing = sorted(((ids, one, other) for ids, one, other in both if one != other), key=lambda each: len(each[0]))
    for ids, one, other in differing:
        kind, what, fix = _decode_cause(a, b, one, other)
        earlier = found.get(kind)
        if earlier is None:
            small = tuple(smallest(ids, partial(_same_way, a, b, kind)))
            texts = a.decode([small])[0], b.decode([small])[0]
            outcomes = outcome(a, small, texts[0]), outcome(b, small, texts[1])
            found[kind] = Skew(kind, "decode", what, fix, 1, (sequences[ids],), small, *outcomes)
        else:
            where = tuple(dict.fromkeys((*earlier.where, sequences[ids])))[:_WHERE]
            found[kind] = Skew(
                kind, "decode", what, fix, earlier.count + 1, where, earlier.example, earlier.a, earlier.b
            )
    return list(found.values())


def _same_way(a: Side, b: Side, kind: Kind, ids: Sequence[int]) -> bool:
    one, other = a.decode([ids])[0], b.decode([ids])[0]
    return one != other and _decode_cause(a, b, one, other)[0] == kind


def _decode_cause(a: Side, b: Side, one: str, other: str) -> tuple[Kind, str, str]:
    if _cleaned(one) == other or _cleaned(other) == one:
        side = "B" if _cleaned(one) == other else "A"
        return (
            "decode clean-up",
            f"{side} takes out spaces before punctuation when decoding (clean_up_tokenization_spaces)",
            "Set clean_up_tokenization_spaces to false, and record ids: text that was cleaned up encodes differently.",
        )
    if a.facts.spec is not None and b.facts.spec is not None:
        theirs, ours = part_of(a.facts.spec, "decoder"), part_of(b.facts.spec, "decoder")
        if theirs != ours:
            what = f"the decoder is {brief(theirs)} in A and {brief(ours)} in B"
            return "decoder", what, SAME_FILES if a.facts.kind == b.facts.kind else LOAD_THE_FILE
    if one.strip(" ") == other.strip(" "):
        return "decoder", "one side drops or adds a space at the edge of what it decodes", LOAD_THE_FILE
    if "�" in one + other:
        return "decoder", "the sides write bytes that are not a whole character differently", LOAD_THE_FILE
    return "decoder", "the sides decode the same ids to different texts", SAME_FILES


def _cleaned(text: str) -> str:
    for spaced in _CLEAN_UP:
        text = text.replace(spaced, spaced.strip())
    return text
