"""Why two sides give a text different ids: found by exchanging one part at a time.

Where both tokenizer.json are known, one part of side B is put into side A. If that makes B's ids of the text, that part
is the cause. Where only one is known, parts in common use are tried in its place. Only where neither is known, or
nothing helps, the ids themselves are looked at.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, TypeAlias

import tokenizers

from tokentape.audit.skew.findings import Kind
from tokentape.audit.skew.known_parts import SENTENCEPIECE, SPLIT_NAMES, is_byte_level, normalizers, pre_tokenizers
from tokentape.audit.skew.sides.base import BackendToken, Side, SideFacts
from tokentape.audit.skew.sides.from_spec import load_spec
from tokentape.audit.skew.spec_parts import PARTS, Spec, differing_parts, part_of, with_part
from tokentape.errors import InvalidRequest, TokenizerUnusable

Encoder: TypeAlias = Callable[[Sequence[str]], list[list[int]]]

_ADDED = "added"
SAME_FILES = "Use the tokenizer.json of the serving side on both: compare the hashes in this report."
LOAD_THE_FILE = (
    "Load tokenizer.json itself, with `tokenizers` or PreTrainedTokenizerFast(tokenizer_file=...); a loader that "
    "builds the tokenizer from its class changes it."
)


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of different ids."""

    kind: Kind
    what: str
    fix: str
    key: str
    """Two inputs with causes of one key differ for the same reason."""
    encoder: Encoder | None = None
    """Encodes as one side does, made from the other with nothing but the cause changed."""
    gives: str = "b"
    """Which side's ids `encoder` gives, `a` or `b`."""


class TextCauses:
    """Explains differences between two sides. Exchanged tokenizers are made when first needed, and kept."""

    def __init__(self, a: Side, b: Side) -> None:
        self._a, self._b = a, b
        self._exchanged: dict[tuple[str, ...], Encoder | None] = {}
        self._trials: _Trials | None = None
        both = a.facts.spec is not None and b.facts.spec is not None
        self._differing = [n for n in differing_parts(a.facts, b.facts) if n not in ("post_processor", "decoder")]
        self._added = unlike_tokens(a.facts, b.facts) if both else {}

    def cause_of(self, text: str, a_ids: list[int], b_ids: list[int], *, special: bool = False) -> Cause:
        """Why the sides give a text these ids. With `special`, BOS and EOS were asked for."""
        if special or _bos_only(a_ids, b_ids, self._a.facts, self._b.facts):
            return _special_cause(text, a_ids, b_ids, self._a, self._b)
        a, b = self._a.facts, self._b.facts
        token = _token_at_fault(text, a, b)
        if a.spec is not None and b.spec is not None:
            found = self._by_exchange(text, b_ids)
        else:
            found = self._by_trial(text, a_ids, b_ids)
        return found or _by_looking(text, a_ids, b_ids, self._a, self._b, token)

    def _by_exchange(self, text: str, b_ids: list[int]) -> Cause | None:
        names = [*self._differing, *(f"{_ADDED}:{said}" for said in self._added)]
        for several in (1, 2):
            for group in combinations(names, several):
                encoder = self._exchange(group)
                if encoder is not None and _encodes(encoder, text) == b_ids:
                    return self._exchanged_cause(group, encoder)
        if not names:
            a, b = self._a.facts, self._b.facts
            what = (
                f"tokenizer.json says the same on both sides; {a.kind} ({_versions(a)}) and {b.kind} ({_versions(b)})"
            )
            return Cause("library", f"{what} run it differently", _library_fix(a, b), "library")
        return None

    def _exchange(self, names: tuple[str, ...]) -> Encoder | None:
        """Side A's tokenizer with these parts of B's; None if they don't fit together."""
        if names not in self._exchanged:
            a, b = self._a.facts.spec, self._b.facts.spec
            assert a is not None
            assert b is not None
            made = a
            for name in names:
                kind, _, said = name.partition(":")
                made = _with_tokens(made, b, self._added[said]) if kind == _ADDED else with_part(made, name, b)
            try:
                self._exchanged[names] = encoder_of(load_spec(made))
            except TokenizerUnusable:
                self._exchanged[names] = None
        return self._exchanged[names]

    def _exchanged_cause(self, names: tuple[str, ...], encoder: Encoder) -> Cause:
        a, b = self._a.facts, self._b.facts
        said = []
        for name in names:
            kind, _, how = name.partition(":")
            said.append(added_words(self._added[how], a, b) if kind == _ADDED else _part_words(name, a, b))
        kind = PARTS.get(names[0].partition(":")[0], "added token")
        return Cause(kind, " and ".join(said), _fix(kind, a, b), "+".join(names), encoder)

    def _by_trial(self, text: str, a_ids: list[int], b_ids: list[int]) -> Cause | None:
        """Try parts in common use on the side whose tokenizer.json is known."""
        known, wanted, gives = (self._a, b_ids, "b") if self._a.facts.spec is not None else (self._b, a_ids, "a")
        if known.facts.spec is None:
            return None
        for kind, what, encoder in self._trials_of(known.facts.spec):
            if _encodes(encoder, text) == wanted:
                return Cause(
                    kind,
                    f"{'B' if gives == 'b' else 'A'} behaves as {'A' if gives == 'b' else 'B'} would with {what}",
                    _fix(kind, self._a.facts, self._b.facts),
                    f"{kind}:{what}",
                    encoder,
                    gives,
                )
        return None

    def _trials_of(self, spec: Spec) -> _Trials:
        if self._trials is None:
            self._trials = _Trials(spec)
        return self._trials


def encoder_of(tokenizer: tokenizers.Tokenizer) -> Encoder:
    """Plain encoding with a tokenizer, many texts at once."""

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    return encode


def _encodes(encoder: Encoder, text: str) -> list[int]:
    return encoder([text])[0]


class _Trials:
    """What a known tokenizer might be on the other side: one thing changed at a time. Made when first asked for."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._made: dict[str, Encoder] = {}

    def __iter__(self) -> Iterator[tuple[Kind, str, Encoder]]:
        for what, part in normalizers().items():
            yield "normalizer", what, self._swapped(normalizer=part)
        for what, part in pre_tokenizers(self._spec).items():
            yield "pre-tokenizer", what, self._swapped(pre_tokenizer=part)
        if not is_byte_level(self._spec):
            for what, (normalizer, pre_tokenizer) in SENTENCEPIECE.items():
                yield "pre-tokenizer", what, self._swapped(normalizer=normalizer, pre_tokenizer=pre_tokenizer)
        added = self._spec.get("added_tokens") or []
        for what, tokens in _added_trials(added).items():
            if tokens != added:
                yield "added token", what, self._loaded(what, {**self._spec, "added_tokens": tokens})
        model = self._spec["model"]
        if model["type"] == "BPE":
            what = f"ignore_merges={not model.get('ignore_merges')}"
            settings = {**model, "ignore_merges": not model.get("ignore_merges")}
            yield "model settings", what, self._loaded(what, {**self._spec, "model": settings})

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        return load_spec(self._spec)

    def _swapped(self, **parts: Any) -> Encoder:
        """Encodes with other parts put into the one tokenizer for as long as it takes: loading another is slow."""
        tokenizer = self._tokenizer
        new = {name: _loaded_part(name, part) for name, part in parts.items()}
        own = {name: getattr(tokenizer, name) for name in parts}

        def encode(texts: Sequence[str]) -> list[list[int]]:
            try:
                for name, part in new.items():
                    setattr(tokenizer, name, part)
                return encoder_of(tokenizer)(texts)
            finally:
                for name, part in own.items():
                    setattr(tokenizer, name, part)

        return encode

    def _loaded(self, what: str, spec: Spec) -> Encoder:
        if what not in self._made:
            self._made[what] = encoder_of(load_spec(spec))
        return self._made[what]


def _added_trials(added: list[Any]) -> dict[str, list[Any]]:
    changes = {
        "its added tokens read as text": [],
        "only those of its added tokens that are special": [token for token in added if token["special"]],
    }
    for flag in ("lstrip", "rstrip", "normalized", "single_word"):
        for value in (True, False):
            changes[f"{flag}={value} on its added tokens"] = [{**token, flag: value} for token in added]
    changes["lstrip=True and rstrip=True on its added tokens"] = [{**t, "lstrip": True, "rstrip": True} for t in added]
    return changes


def _loaded_part(name: str, part: Any) -> Any:
    if part is None:
        return None
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}, name: part}
    loaded = tokenizers.Tokenizer.from_str(json.dumps(empty))
    return loaded.normalizer if name == "normalizer" else loaded.pre_tokenizer


def _token_at_fault(text: str, a: SideFacts, b: SideFacts) -> str | None:
    """The longest added token that the text spells and the two sides hold differently; else any that it spells."""
    spelled = sorted((t for t in {*a.added, *b.added} if t in text), key=len, reverse=True)
    unlike = [t for t in spelled if a.added.get(t) != b.added.get(t)]
    return next(iter(unlike or spelled), None)


def unlike_tokens(a: SideFacts, b: SideFacts) -> dict[str, tuple[str, ...]]:
    """Added tokens that the sides hold differently, by what the difference is."""
    found: dict[str, list[str]] = {}
    for content in {**a.added, **b.added}:
        one, other = a.added.get(content), b.added.get(content)
        if one == other:
            continue
        if one is None or other is None:
            said = f"not in {'A' if one is None else 'B'}"
        elif one.id != other.id:
            said = "ids"
        else:
            names = [n for n in BackendToken.__dataclass_fields__ if getattr(one, n) != getattr(other, n)]
            said = ", ".join(f"{n}={getattr(one, n)} against {getattr(other, n)}" for n in names)
        found.setdefault(said, []).append(content)
    return {said: tuple(tokens) for said, tokens in found.items()}


def added_words(tokens: Sequence[str], a: SideFacts, b: SideFacts) -> str:
    """How the sides hold these added tokens, all in the same way differently."""
    token, others = tokens[0], f" (and of {len(tokens) - 1} more)" if len(tokens) > 1 else ""
    one, other = a.added.get(token), b.added.get(token)
    if one is None or other is None:
        have, lack = ("B", "A") if one is None else ("A", "B")
        more = f" and {len(tokens) - 1} more" if len(tokens) > 1 else ""
        verb = "are added tokens" if more else "is an added token"
        return f"{token!r}{more} {verb} of {have} and not of {lack}, which reads it as text"
    if one.id != other.id:
        return f"the id of the added token {token!r}{others} is {one.id} in A and {other.id} in B"
    names = [n for n in BackendToken.__dataclass_fields__ if getattr(one, n) != getattr(other, n)]
    said = ", ".join(f"{n}={getattr(one, n)} against {getattr(other, n)}" for n in names)
    return f"the flags of the added token {token!r}{others} differ: {said}"


def _with_tokens(spec: Spec, other: Spec, tokens: Sequence[str]) -> dict[str, Any]:
    """A tokenizer.json that holds these added tokens as the other one does, or lacks them as it does."""
    kept = [token for token in spec.get("added_tokens") or () if token["content"] not in tokens]
    taken = [token for token in other.get("added_tokens") or () if token["content"] in tokens]
    return {**spec, "added_tokens": sorted([*kept, *taken], key=lambda token: token["id"])}


def _part_words(name: str, a: SideFacts, b: SideFacts) -> str:
    assert a.spec is not None
    assert b.spec is not None
    one, other = part_of(a.spec, name), part_of(b.spec, name)
    match name:
        case "merges" | "vocabulary":
            return f"the {name} differ: {len(one)} entries in A, {len(other)} in B"
        case "settings":
            names = sorted(k for k in {*one, *other} if one.get(k) != other.get(k))
            said = ", ".join(f"{k}={one.get(k)} against {other.get(k)}" for k in names)
            return f"the model settings differ: {said}"
    return f"the {PARTS[name]} is {brief(one)} in A and {brief(other)} in B"


def brief(part: Any) -> str:
    """A part of a tokenizer.json in a few words."""
    if part is None:
        return "none"
    steps = next((part[key] for key in ("normalizers", "pretokenizers", "processors", "decoders") if key in part), None)
    if steps is not None:
        return " + ".join(brief(step) for step in steps) or "none"
    said = [_argument(key, value) for key, value in part.items() if key != "type" and value not in (None, False, "")]
    short = ", ".join(one for one in said if one)
    return f"{part['type']}({short})" if short else str(part["type"])


def _argument(key: str, value: Any) -> str:
    if key in ("trim_offsets", "behavior", "special_tokens", "pair"):
        return ""
    if isinstance(value, Mapping):
        value = next(iter(value.values()), "")
        if value in SPLIT_NAMES:
            return f"as {SPLIT_NAMES[value]}"
    text = str(value)
    return f"{key}={text if len(text) <= 60 else text[:57] + '...'}"


def _bos_only(a_ids: list[int], b_ids: list[int], a: SideFacts, b: SideFacts) -> bool:
    """Whether one side's ids are the other's with nothing but special tokens before or behind them."""
    longer, shorter = sorted((a_ids, b_ids), key=len, reverse=True)
    at = _place(shorter, longer)
    if at is None or a_ids == b_ids:
        return False
    edges = {t.id for side in (a, b) for t in side.added.values() if t.special}
    return edges.issuperset([*longer[:at], *longer[at + len(shorter) :]])


def _place(part: Sequence[int], whole: Sequence[int]) -> int | None:
    """Where a sequence stands within another, from the end if it is in several places."""
    places = range(len(whole) - len(part), -1, -1)
    return next((at for at in places if whole[at : at + len(part)] == part), None) if part else None


def _special_cause(text: str, a_ids: list[int], b_ids: list[int], a: Side, b: Side) -> Cause:
    def around(side: Side, ids: list[int]) -> str:
        plain = side.encode([text])[0]
        at = _place(plain, ids) if plain else len(ids)
        if at is None:
            return "other tokens around"
        before, after = ids[:at], ids[at + len(plain) :]
        said = [f"{' '.join(side.token(i) or str(i) for i in before)} before"] if before else []
        said += [f"{' '.join(side.token(i) or str(i) for i in after)} after"] if after else []
        return " and ".join(said) or "nothing around"

    one, other = around(a, a_ids), around(b, b_ids)
    return Cause(
        "BOS/EOS",
        f"A puts {one} the text, B {other}",
        "Let one thing add BOS and EOS. A rendered chat template has its own: encode it with add_special_tokens=False.",
        f"special:{one}:{other}",
    )


def _fix(kind: Kind, a: SideFacts, b: SideFacts) -> str:
    """What to do about a cause of that kind."""
    if any("GGUF" in side.kind or "llama.cpp" in side.kind for side in (a, b)):
        if kind == "pre-tokenizer":
            return (
                "Convert the GGUF with a converter that knows this model: its tokenizer.ggml.pre names another split."
            )
        if kind == "normalizer":
            return (
                "llama.cpp does not normalize text for such a vocabulary: normalize it before it reaches either side."
            )
    return SAME_FILES if a.kind == b.kind else LOAD_THE_FILE


def _by_looking(text: str, a_ids: list[int], b_ids: list[int], a: Side, b: Side, token: str | None) -> Cause:
    """What the ids show by themselves."""
    for form in ("NFC", "NFKC", "NFD", "NFKD"):
        normal = unicodedata.normalize(form, text)
        if normal == text:
            continue
        try:
            if a.encode([normal]) == b.encode([normal]):
                what = f"the sides agree on the text in {form}: one of them normalizes to it and the other does not"
                return Cause("normalizer", what, SAME_FILES, f"normalizer:{form}")
        except InvalidRequest:
            continue
    if token is not None and token in text:
        what = added_words((token,), a.facts, b.facts)
        if a.facts.added.get(token) == b.facts.added.get(token):
            what = f"{token!r} is read as a control token on one side, or takes the white space around it"
        return Cause("added token", what, SAME_FILES, f"added:{token}")
    one, other = _pieces(a, a_ids), _pieces(b, b_ids)
    if one and one == other:
        what = "the same tokens have other ids"
        return Cause("vocabulary", what, SAME_FILES, "vocabulary")
    if one and other and "".join(one) == "".join(other):
        what = "the text is cut elsewhere: another split, other merges, or another way to choose between tokens"
        return Cause("pre-tokenizer", what, SAME_FILES, "cut")
    if one and other and "".join(one).strip(" ▁Ġ") == "".join(other).strip(" ▁Ġ"):
        what = "one side puts a space before the text, or takes one away"
        return Cause("pre-tokenizer", what, SAME_FILES, "prefix space")
    return Cause("unknown", "the sides give this text other tokens", SAME_FILES, "unknown")


def _pieces(side: Side, ids: list[int]) -> list[str]:
    found = [side.token(one) for one in ids]
    return [piece for piece in found if piece is not None] if None not in found else []


def _versions(facts: SideFacts) -> str:
    return ", ".join(f"{name} {number}" for name, number in facts.versions.items())


def _library_fix(a: SideFacts, b: SideFacts) -> str:
    if dict(a.versions) != dict(b.versions):
        return "Pin the same library versions on both sides."
    return LOAD_THE_FILE
