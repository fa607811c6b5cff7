"""Compare the facts of two backends: differences that no text of the battery shows, but that change ids or masks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from tokentape.audit._skew.backends.base import Backend, BackendFacts
from tokentape.audit._skew.causes import added_words, unlike_tokens
from tokentape.audit._skew.findings import Severity, Skew, SkewResult
from tokentape.audit._skew.id_causes import SAME_FILES
from tokentape.audit._skew.probing import result
from tokentape.audit._skew.spec_parts import Spec, part_of

_PAD_FIX = "Give padding a token of its own: masks made from a padding token that is EOS leave ends of turns untrained."


def fact_findings(side_a: Backend, side_b: Backend, differing: Collection[str], found: Collection[Skew]) -> list[Skew]:
    """Return differences of the facts that are in none of the findings yet. `differing` are parts of tokenizer.json."""
    a, b = side_a.facts, side_b.facts
    kinds = {one.kind for one in found}
    known = " ".join(one.cause for one in found)
    new = ((one, tokens) for one, tokens in _tables(a, b, differing) if one.cause not in known)
    findings = [
        _shown(one, tokens, side_a, side_b) for one, tokens in new if one.kind != "vocabulary" or one.kind not in kinds
    ]
    findings += _special_tokens(a, b)
    if None not in (a.cleans_up, b.cleans_up) and a.cleans_up != b.cleans_up and "decode clean-up" not in kinds:
        cause = f"clean_up_tokenization_spaces is {a.cleans_up} in A and {b.cleans_up} in B"
        findings.append(Skew("decode clean-up", "facts", cause, "Set it to false in tokenizer_config.json.", 1))
    return findings


def fact_notes(a: BackendFacts, b: BackendFacts, found: Collection[Skew]) -> list[str]:
    """Return notes on differences of the facts that change nothing that was tried."""
    kinds = {one.kind for one in found}
    notes = [f"{letter}: {note}" for letter, side in (("A", a), ("B", b)) for note in side.notes]
    for library in sorted({*a.versions} & {*b.versions}):
        if a.versions[library] != b.versions[library]:
            notes.append(f"{library} is {a.versions[library]} in A and {b.versions[library]} in B")
    if None not in (a.vocab_size, b.vocab_size) and a.vocab_size != b.vocab_size and "vocabulary" not in kinds:
        notes.append(f"ids end at {a.vocab_size} in A and at {b.vocab_size} in B")
    return notes


def _tables(a: BackendFacts, b: BackendFacts, differing: Collection[str]) -> Iterator[tuple[Skew, Sequence[str]]]:
    """Yield findings, each with the tokens that it is about."""
    if a.spec is None or b.spec is None:
        return
    for said, tokens in unlike_tokens(a, b).items():
        # Converters mark what looks like a control token: it has the same id, and is hidden in what is decoded.
        marked = a.kind != b.kind and said.startswith("special=") and "," not in said
        severity: Severity = "caution" if marked else "skew"
        found = Skew("added token", "facts", added_words(tokens, a, b), SAME_FILES, len(tokens), severity=severity)
        yield _with_hidden(found, tokens[0], a, b) if said.startswith("special=") else found, tokens
    if "vocabulary" in differing:
        one, other = _ids(a.spec), _ids(b.spec)
        added = {**a.added, **b.added}
        unlike = sorted(t for t in {*one, *other} if one.get(t) != other.get(t) and t not in added)
        if unlike:
            said = f"{len(unlike)} tokens have other ids or are on one side only, the first is {unlike[0]!r}"
            yield Skew("vocabulary", "facts", f"the vocabularies differ: {said}", SAME_FILES, len(unlike)), unlike


def _shown(found: Skew, tokens: Sequence[str], a: Backend, b: Backend) -> Skew:
    """Return a finding with a token that the sides encode otherwise, or an id that they decode otherwise, if any."""
    if found.example is not None:
        return found
    texts = tokens if found.kind == "added token" else ()
    for text, one, other in zip(texts, a.encode(texts), b.encode(texts), strict=True):
        if one != other:
            return replace(found, example=text, a=result(a, one), b=result(b, other))
    if not all("decode" in side.facts.abilities for side in (a, b)):
        return found
    tables = [_ids(side.facts.spec or {}) for side in (a, b)]
    ids = {table[token] for table in tables for token in tokens if token in table}
    asked = [(one,) for one in sorted(ids & {*tables[0].values()} & {*tables[1].values()})]
    for example, text, another in zip(asked, a.decode(asked), b.decode(asked), strict=True):
        if text != another:
            return replace(found, example=example, a=result(a, example, text), b=result(b, example, another))
    return found


def _with_hidden(found: Skew, token: str, a: BackendFacts, b: BackendFacts) -> Skew:
    """Return a finding with the id of a token that is special on one side: decoding may skip it there."""
    ids = (a.added[token].id,)
    one, other = (SkewResult(ids, (token,), "" if side.added[token].special else token) for side in (a, b))
    return replace(found, example=ids, a=one, b=other)


def _ids(spec: Spec) -> dict[str, int]:
    vocab = part_of(spec, "vocabulary")
    return dict(vocab) if isinstance(vocab, Mapping) else {entry[0]: number for number, entry in enumerate(vocab)}


def _same_loader(a: BackendFacts, b: BackendFacts) -> bool:
    return a.kind == b.kind and all("tokenizer_config.json" in side.files for side in (a, b))


def _special_tokens(a: BackendFacts, b: BackendFacts) -> Iterator[Skew]:
    if not _same_loader(a, b) and (not a.special_tokens or not b.special_tokens):
        return
    for name in sorted({*a.special_tokens, *b.special_tokens}):
        one, other = a.special_tokens.get(name), b.special_tokens.get(name)
        if one == other or (name != "pad_token" and None in (one, other) and not _same_loader(a, b)):
            continue  # a loader may name fewer; templates that read what one side lacks are found by what they write
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
