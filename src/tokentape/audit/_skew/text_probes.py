"""Compare how backends encode texts, with and without BOS and EOS, and how they decode ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tokentape.audit._skew.backends import Backend
from tokentape.audit._skew.causes import LOAD_THE_FILE, SAME_FILES, TextCauses
from tokentape.audit._skew.findings import Kind, Probe, Skew, SkewResult
from tokentape.audit._skew.parts import brief, part_of
from tokentape.audit._skew.probing import WHERE, explain, result, smallest, smallest_text
from tokentape.errors import InvalidRequest

MOST_EXAMINED = 60

_BLOCKS = (200, 20, 1)
_MOST_BLOCKS = 20
"""Sizes of blocks, and the number of differing blocks that are searched further."""

_NO_CLEAN_UP = (
    "Set clean_up_tokenization_spaces to false, and record ids: text that was cleaned up encodes differently."
)
_CLEAN_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


@dataclass(frozen=True, slots=True)
class Differing:
    """A text that the backends encode differently."""

    text: str
    where: str
    """Its group in the battery, or its file."""
    a_ids: list[int]
    b_ids: list[int]


def unstable_finding(backend: Backend, letter: str, texts: Collection[str], known: dict[str, list[int]]) -> Skew | None:
    """Return a finding if a side gives a text other ids a second time, or has dropout. Store the ids in `known`."""
    dropout = ((backend.facts.spec or {}).get("model") or {}).get("dropout")
    tries = 20 if dropout else 1
    asked = list(texts)
    first = backend.encode(asked)
    known.update(zip(asked, first, strict=True))
    shown: tuple[str, SkewResult, SkewResult] | None = None
    for _ in range(tries):
        again = backend.encode(asked)
        unlike = [(t, x, y) for t, x, y in zip(asked, first, again, strict=True) if x != y]
        if unlike:
            text, one, other = min(unlike, key=lambda each: len(each[0]))
            shown = text, result(backend, one), result(backend, other)
            break
    if shown is None and not dropout:
        return None
    kind: Kind = "model settings" if dropout else "unknown"
    cause = f"{letter} disagrees with itself: it gives the same text other ids the second time"
    fix = "Make this side deterministic before you compare anything with it."
    if dropout:
        cause = f"{cause}, since model.dropout is {dropout} in its tokenizer.json"
        fix = "Remove dropout from tokenizer.json; it is for training a tokenizer's model."
    return Skew(kind, "encode", cause, fix, 1, (), *(shown or (None,)))


def encoded(
    backend: Backend, texts: Sequence[str], known: Mapping[str, list[int]], *, special: bool = False
) -> list[list[int]]:
    """Return the ids of texts. Ask the backend only for texts that are not in `known`."""
    new = [text for text in texts if text not in known]
    found = {**known, **dict(zip(new, backend.encode(new, special=special) if new else (), strict=True))}
    return [found[text] for text in texts]


def compare_texts(
    a: Backend,
    b: Backend,
    texts: Mapping[str, str],
    *,
    special: bool = False,
    known: Sequence[Mapping[str, list[int]]] = ({}, {}),
) -> list[Differing]:
    """Return the texts that get different ids. `texts` maps each text to its group, `known` are ids of both sides."""
    asked = list(texts)
    ids = (encoded(side, asked, have, special=special) for side, have in zip((a, b), known, strict=True))
    return [
        Differing(text, texts[text], one, other) for text, one, other in zip(asked, *ids, strict=True) if one != other
    ]


def compare_in_blocks(a: Backend, b: Backend, texts: Sequence[str], where: str) -> list[Differing]:
    """Find texts that get different ids with few requests: as lines of blocks, the first of which are split."""
    found: list[Differing] = []
    groups = [texts[at : at + _BLOCKS[0]] for at in range(0, len(texts), _BLOCKS[0])]
    for size in (*_BLOCKS[1:], 0):
        blocks = {"\n".join(group): group for group in groups}
        differing = compare_texts(a, b, dict.fromkeys(blocks, where))[:_MOST_BLOCKS]
        if not size:
            return found + differing
        groups = []
        for one in differing:
            smaller = [blocks[one.text][at : at + size] for at in range(0, len(blocks[one.text]), size)]
            if compare_texts(a, b, dict.fromkeys(map("\n".join, smaller), where)):
                groups += smaller
            else:
                found.append(one)
    return found


def explain_texts(
    a: Backend,
    b: Backend,
    causes: TextCauses,
    differing: Iterable[Differing],
    probe: Probe,
    progress: Callable[[str], None] = lambda _: None,
    *,
    special: bool = False,
) -> tuple[list[Skew], int]:
    """Return one finding per cause, and the number of texts beyond `MOST_EXAMINED` that were left unexplained."""

    def differs(text: str) -> bool:
        try:
            return a.encode([text], special=special) != b.encode([text], special=special)
        except InvalidRequest:
            return False

    def examine(first: Differing) -> tuple[str, Skew, Callable[[list[Differing]], Sequence[bool]]]:
        small = smallest_text(first.text, differs)
        a_ids, b_ids = a.encode([small], special=special)[0], b.encode([small], special=special)[0]
        cause = causes.cause_of(small, a_ids, b_ids, special=special)

        def explains(left: list[Differing]) -> Sequence[bool]:
            if cause.encoder is None:
                return [False] * len(left)
            made = cause.encoder([one.text for one in left])
            wanted = [one.b_ids if cause.gives == "b" else one.a_ids for one in left]
            return [ids == expected for ids, expected in zip(made, wanted, strict=True)]

        found = Skew(cause.kind, probe, cause.what, cause.fix, 1, (), small, result(a, a_ids), result(b, b_ids))
        return cause.key, found, explains

    inputs = [(one.where, one) for one in sorted(differing, key=lambda one: len(one.text))]
    return explain(inputs, MOST_EXAMINED, examine, progress)


def special_texts(a: Backend, b: Backend) -> dict[str, str]:
    """Return texts for BOS and EOS: short ones, and ones that begin or end with such a token already."""
    texts = ["a", "a b", "", "\n"]
    for backend in (a, b):
        for name in ("bos_token", "eos_token"):
            token = backend.facts.special_tokens.get(name)
            if token:
                texts += [f"{token}a", f"a{token}"]
    return dict.fromkeys(texts, "BOS and EOS")


def decode_findings(a: Backend, b: Backend, sequences: Mapping[tuple[int, ...], str]) -> list[Skew]:
    """Return one finding for each way in which the backends decode the same ids to different texts."""
    found: dict[str, Skew] = {}
    asked = list(sequences)
    both = zip(asked, a.decode(asked), b.decode(asked), strict=True)
    differing = [(ids, one, other) for ids, one, other in both if one != other]
    for ids, one, other in sorted(differing, key=lambda each: len(each[0])):
        kind, what, fix = _decode_cause(a, b, one, other)
        earlier = found.get(kind)
        if earlier is not None:
            where = tuple(dict.fromkeys((*earlier.where, sequences[ids])))[:WHERE]
            found[kind] = replace(earlier, cause=what, fix=fix, count=earlier.count + 1, where=where)
            continue

        def same_way(ids: Sequence[int], kind: Kind = kind) -> bool:
            one, other = a.decode([ids])[0], b.decode([ids])[0]
            return one != other and _decode_cause(a, b, one, other)[0] == kind

        small = tuple(smallest(ids, same_way))
        results = result(a, small, a.decode([small])[0]), result(b, small, b.decode([small])[0])
        found[kind] = Skew(kind, "decode", what, fix, 1, (sequences[ids],), small, *results)
    return list(found.values())


def _decode_cause(a: Backend, b: Backend, one: str, other: str) -> tuple[Kind, str, str]:
    ours, theirs = (part_of(side.facts.spec, "decoder") if side.facts.spec else None for side in (a, b))
    both = a.facts.spec is not None and b.facts.spec is not None
    if both and ours != theirs and a.facts.cleans_up == b.facts.cleans_up:
        what = f"the decoder is {brief(ours)} in A and {brief(theirs)} in B"
        return "decoder", what, SAME_FILES if a.facts.kind == b.facts.kind else LOAD_THE_FILE
    if _cleaned(one) == other or _cleaned(other) == one:
        letter = "B" if _cleaned(one) == other else "A"
        what = f"{letter} removes spaces before punctuation when decoding (clean_up_tokenization_spaces)"
        return "decode clean-up", what, _NO_CLEAN_UP
    if one.strip(" ") == other.strip(" "):
        return "decoder", "one side drops or adds a space at the edge of what it decodes", LOAD_THE_FILE
    if "�" in one + other:
        return "decoder", "the sides write bytes that are not a whole character differently", LOAD_THE_FILE
    return "decoder", "the sides decode the same ids to different texts", SAME_FILES


def _cleaned(text: str) -> str:
    for spaced in _CLEAN_UP:
        text = text.replace(spaced, spaced.strip())
    return text
