"""What two sides say of themselves: differences that no text of a battery shows, and yet change ids, text or masks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from tokentape.audit.skew.causes import SAME_FILES, added_words, brief, unlike_tokens
from tokentape.audit.skew.findings import Skew, SkewResult
from tokentape.audit.skew.sides.base import SideFacts
from tokentape.audit.skew.spec_parts import differing_parts, part_of

_PAD_FIX = "Give padding a token of its own: masks made from a padding token that is EOS leave ends of turns untrained."


def fact_findings(a: SideFacts, b: SideFacts, found: Collection[Skew]) -> list[Skew]:
    """What of two sides' facts differs and is in none of the findings yet."""
    kinds = {one.kind for one in found}
    told = " ".join(one.cause for one in found)
    findings = [
        one for one in _tables(a, b) if one.cause not in told and (one.kind != "vocabulary" or one.kind not in kinds)
    ]
    findings += _special_tokens(a, b)
    if None not in (a.cleans_up, b.cleans_up) and a.cleans_up != b.cleans_up and "decode clean-up" not in kinds:
        cause = f"clean_up_tokenization_spaces is {a.cleans_up} in A and {b.cleans_up} in B"
        findings.append(Skew("decode clean-up", "facts", cause, "Set it to false in tokenizer_config.json.", 1))
    return findings


def fact_notes(a: SideFacts, b: SideFacts, found: Collection[Skew]) -> list[str]:
    """What a reader should know of the sides, though nothing that was tried differs by it."""
    kinds = {one.kind for one in found}
    notes = [f"{letter}: {note}" for letter, side in (("A", a), ("B", b)) for note in side.notes]
    for library in sorted({*a.versions} & {*b.versions}):
        if a.versions[library] != b.versions[library]:
            notes.append(f"{library} is {a.versions[library]} in A and {b.versions[library]} in B")
    shown = {"normalizer": "normalizer", "pre_tokenizer": "pre-tokenizer", "decoder": "decoder"}
    for part, kind in shown.items():
        if part in differing_parts(a, b) and kind not in kinds:
            assert a.spec is not None
            assert b.spec is not None
            one, other = brief(part_of(a.spec, part)), brief(part_of(b.spec, part))
            notes.append(f"the {kind}s are written differently, and no text tried shows it: {one} and {other}")
    if None not in (a.vocab_size, b.vocab_size) and a.vocab_size != b.vocab_size and "vocabulary" not in kinds:
        notes.append(f"ids end at {a.vocab_size} in A and at {b.vocab_size} in B")
    return notes


def _tables(a: SideFacts, b: SideFacts) -> Iterator[Skew]:
    if a.spec is None or b.spec is None:
        return
    for tokens in unlike_tokens(a, b).values():
        yield Skew(
            kind="added token",
            probe="facts",
            cause=added_words(tokens, a, b),
            fix=SAME_FILES,
            count=len(tokens),
            example=tokens[0],
            a=_held(a, tokens[0]),
            b=_held(b, tokens[0]),
        )
    if "vocabulary" in differing_parts(a, b):
        one, other = (_ids(side) for side in (a, b))
        added = {**a.added, **b.added}
        unlike = sorted(t for t in {*one, *other} if one.get(t) != other.get(t) and t not in added)
        if unlike:
            said = f"{len(unlike)} tokens have other ids or are on one side only, the first is {unlike[0]!r}"
            yield Skew("vocabulary", "facts", f"the vocabularies differ: {said}", SAME_FILES, len(unlike))


def _held(side: SideFacts, token: str) -> SkewResult:
    return SkewResult((side.added[token].id,), (token,)) if token in side.added else SkewResult()


def _ids(side: SideFacts) -> dict[str, int]:
    assert side.spec is not None
    vocab = part_of(side.spec, "vocabulary")
    return dict(vocab) if isinstance(vocab, Mapping) else {entry[0]: number for number, entry in enumerate(vocab)}


def _special_tokens(a: SideFacts, b: SideFacts) -> Iterator[Skew]:
    if not a.special_tokens or not b.special_tokens:
        return
    for name in sorted({*a.special_tokens, *b.special_tokens}):
        one, other = a.special_tokens.get(name), b.special_tokens.get(name)
        if one == other or (name != "pad_token" and None in (one, other)):
            continue  # templates that read what one side lacks are found by what they write
        cause = f"{name} is {one or 'not set'} in A and {other or 'not set'} in B"
        if name == "pad_token":
            ends = [
                letter
                for letter, side, pad in (("A", a, one), ("B", b, other))
                if pad and pad == side.special_tokens.get("eos_token")
            ]
            cause += f"; it is the EOS token in {' and '.join(ends)}" if ends else ""
            if ends or None not in (one, other):  # who only serves needs no padding
                yield Skew("padding", "facts", cause, _PAD_FIX if ends else SAME_FILES, 1)
        else:
            yield Skew("special tokens", "facts", cause, "Set it to the same token on both sides.", 1)
    pad = a.special_tokens.get("pad_token")
    if pad and pad == a.special_tokens.get("eos_token") and b.special_tokens.get("pad_token") == pad:
        yield Skew("padding", "facts", f"both sides pad with {pad}, their EOS token", _PAD_FIX, 1, severity="caution")
