"""Compare how backends encode texts, with and without BOS and EOS, and how they decode ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tokentape.audit._skew.backends import Backend
from tokentape.audit._skew.causes import LOAD_THE_FILE, SAME_FILES
from tokentape.audit._skew.findings import Differing, Kind, Skew
from tokentape.audit._skew.parts import brief, part_of
from tokentape.audit._skew.probing import explain, result, smallest

_BLOCKS = (200, 20, 1)
_MOST_BLOCKS = 20
"""The maximum number of differing blocks of one size that are searched further."""

_NO_CLEAN_UP = (
    "Set clean_up_tokenization_spaces to false, and record ids: text that was cleaned up encodes differently."
)
_CLEAN_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


def unstable_finding(backend: Backend, letter: str, texts: Sequence[str]) -> Skew | None:
    """Return a finding if a side's ids of a text change when repeated, or it has dropout."""
    dropout = ((backend.facts.spec or {}).get("model") or {}).get("dropout")
    first = backend.encode(texts)
    cause = f"{letter} disagrees with itself: it gives the same text different ids the second time"
    finding = Skew("unknown", "encode", cause, "Make this side deterministic before you compare anything with it.", 1)
    if dropout:
        cause = f"{cause}, since model.dropout is {dropout} in its tokenizer.json"
        fix = "Remove dropout from tokenizer.json: it is meant for training a model, and makes ids random."
        finding = Skew("model settings", "encode", cause, fix, 1)
    for _ in range(20 if dropout else 1):
        rows = zip(texts, first, backend.encode(texts), strict=True)
        if unlike := [row for row in rows if row[1] != row[2]]:
            text, *ids = min(unlike, key=lambda row: len(row[0]))
            return replace(finding, example=text, a=result(backend, ids[0]), b=result(backend, ids[1]))
    backend.remember(texts, first)
    return finding if dropout else None


def compare_texts(a: Backend, b: Backend, texts: Mapping[str, str], *, special: bool = False) -> list[Differing]:
    """Return the texts whose ids differ. `texts` maps each text to its group."""
    listed = list(texts)
    rows = zip(texts.items(), a.encode(listed, special=special), b.encode(listed, special=special), strict=True)
    return [Differing(text, group, a_ids, b_ids) for (text, group), a_ids, b_ids in rows if a_ids != b_ids]


def compare_in_blocks(a: Backend, b: Backend, texts: Sequence[str], where: str) -> list[Differing]:
    """Find texts whose ids differ with few requests: encode them as lines of blocks, and split blocks that differ."""
    differences: list[Differing] = []
    groups = [texts[start : start + _BLOCKS[0]] for start in range(0, len(texts), _BLOCKS[0])]
    for size in (*_BLOCKS[1:], 0):
        blocks = {"\n".join(group): group for group in groups}
        differing = compare_texts(a, b, dict.fromkeys(blocks, where))[:_MOST_BLOCKS]
        if not size:
            return differences + differing
        groups = []
        for block in differing:
            smaller = [blocks[block.text][start : start + size] for start in range(0, len(blocks[block.text]), size)]
            if compare_texts(a, b, dict.fromkeys(map("\n".join, smaller), where)):
                groups += smaller
            else:
                differences.append(block)
    return differences


def special_texts(a: Backend, b: Backend) -> dict[str, str]:
    """Return short texts that show BOS and EOS, including texts that already begin or end with these tokens."""
    texts = ["a", "a b", "", "\n"]
    for backend in (a, b):
        for name in ("bos_token", "eos_token"):
            token = backend.facts.special_tokens.get(name)
            if token:
                texts += [f"{token}a", f"a{token}"]
    return dict.fromkeys(texts, "BOS and EOS")


def decode_findings(a: Backend, b: Backend, sequences: Mapping[tuple[int, ...], str]) -> list[Skew]:
    """Return one finding for each way in which the backends decode the same ids to different texts."""
    listed = list(sequences)
    rows = zip(listed, zip(a.decode(listed), b.decode(listed), strict=True), strict=True)
    texts = {ids: pair for ids, pair in rows if pair[0] != pair[1]}

    def examine(ids: tuple[int, ...]) -> tuple[str, Skew, Callable[[list[tuple[int, ...]]], Sequence[bool]]]:
        kind, what, fix = _decode_cause(a, b, *texts[ids])

        def same_way(ids: Sequence[int]) -> bool:
            a_text, b_text = a.decode([ids])[0], b.decode([ids])[0]
            return a_text != b_text and _decode_cause(a, b, a_text, b_text)[0] == kind

        small = tuple(smallest(ids, same_way))
        results = result(a, small, a.decode([small])[0]), result(b, small, b.decode([small])[0])
        finding = Skew(kind, "decode", what, fix, 1, (), small, *results)
        return kind, finding, lambda others: [_decode_cause(a, b, *texts[other])[0] == kind for other in others]

    inputs = [(sequences[ids], ids) for ids in sorted(texts, key=len)]
    return explain(inputs, len(inputs), examine, lambda _: None)[0]


def _decode_cause(a: Backend, b: Backend, a_text: str, b_text: str) -> tuple[Kind, str, str]:
    ours, theirs = (part_of(side.facts.spec, "decoder") if side.facts.spec else None for side in (a, b))
    specs_known = a.facts.spec is not None and b.facts.spec is not None
    if specs_known and ours != theirs and a.facts.cleans_up == b.facts.cleans_up:
        what = f"the decoder is {brief(ours)} in A and {brief(theirs)} in B"
        return "decoder", what, SAME_FILES if a.facts.kind == b.facts.kind else LOAD_THE_FILE
    if _cleaned(a_text) == b_text or _cleaned(b_text) == a_text:
        letter = "B" if _cleaned(a_text) == b_text else "A"
        what = f"{letter} removes spaces before punctuation when decoding (clean_up_tokenization_spaces)"
        return "decode clean-up", what, _NO_CLEAN_UP
    if a_text.strip(" ") == b_text.strip(" "):
        return "decoder", "one side drops or adds a space at an end of the decoded text", LOAD_THE_FILE
    if "�" in a_text + b_text:
        return "decoder", "the sides decode bytes of incomplete characters differently", LOAD_THE_FILE
    return "decoder", "the sides decode the same ids to different texts", SAME_FILES


def _cleaned(text: str) -> str:
    for spaced in _CLEAN_UP:
        text = text.replace(spaced, spaced.strip())
    return text
