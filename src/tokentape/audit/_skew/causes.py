"""Find why two backends give a text different ids, by exchanging one part at a time.

If both tokenizer.json are known, a part of backend B is put into backend A. If A then gives B's ids, the part is the
cause. If only one is known, widely used parts are tried in it. If neither is known, or no part helps, the text itself
is changed and cut. A cause is named only if it makes both sides equal on the text. If a tokenizer.json is unknown, the
cause must also keep the ids of texts on which the sides agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import combinations
from typing import Any

import tokenizers

from tokentape._alignment import first_difference
from tokentape.audit._skew import battery
from tokentape.audit._skew import parts as tokenizer_parts
from tokentape.audit._skew.backends import Backend, BackendFacts
from tokentape.audit._skew.backends.spec import load_spec
from tokentape.audit._skew.findings import Cause, Differing, Encoder, Kind, Probe, Skew
from tokentape.audit._skew.probing import explain, result, smallest, smallest_text, token_strings
from tokentape.audit._skew.template_causes import OF_TEXT
from tokentape.errors import InvalidRequest, TokenizerUnusable

_MOST_SPELLED = 2
_MOST_EXAMINED = 60
SAME_FILES = "On both sides, use the tokenizer.json that the weights were trained with; compare the files' hashes."
_WHOLE = "Raise the limit of the side that cuts, or cut the same text on both sides before they encode it."
_AROUND = 24
"""The number of cut positions to try on each side of the first difference."""
LOAD_THE_FILE = (
    "Load tokenizer.json itself, with `tokenizers` or PreTrainedTokenizerFast(tokenizer_file=...); a loader that "
    "builds the tokenizer from its class changes it."
)


class TextCauses:
    """Finds the causes of different ids. Tokenizers with exchanged parts are built on first use, and kept."""

    def __init__(self, a: Backend, b: Backend) -> None:
        self._a, self._b = a, b
        self._exchanged: dict[tuple[str, ...], Encoder | None] = {}
        self.words = cache(self._words_of)  # to compare two vocabularies takes seconds
        self._known: list[Cause] = []
        self.differing = tokenizer_parts.differing_parts(a.facts, b.facts)
        self.tables = tokenizer_parts.differing_tables(a.facts, b.facts)
        specs_known = a.facts.spec is not None and b.facts.spec is not None
        self._added = tokenizer_parts.differing_tokens(a.facts, b.facts) if specs_known else {}

    def explain(
        self,
        differing: Iterable[Differing],
        probe: Probe,
        progress: Callable[[str], None] = lambda _: None,
        *,
        special: bool = False,
    ) -> tuple[list[Skew], int]:
        """Return one finding per cause, and the number of texts beyond `_MOST_EXAMINED` that were left unexplained."""
        a, b = self._a, self._b

        def ids_of(text: str) -> tuple[list[int], list[int]]:
            return a.encode([text], special=special)[0], b.encode([text], special=special)[0]

        def differs(text: str) -> bool:
            try:
                a_ids, b_ids = ids_of(text)
            except InvalidRequest:
                return False
            return a_ids != b_ids

        def examine(first: Differing) -> tuple[str, Skew, Callable[[list[Differing]], Sequence[bool]]]:
            small = smallest_text(first.text, differs)
            a_ids, b_ids = ids_of(small)
            cause = self.cause_of(small, a_ids, b_ids, special=special)

            def explains(others: list[Differing]) -> Sequence[bool]:
                if cause.encoder is None:
                    return [False] * len(others)
                outputs = cause.encoder([other.text for other in others])
                targets = [other.b_ids if cause.gives == "b" else other.a_ids for other in others]
                return [ids == expected for ids, expected in zip(outputs, targets, strict=True)]

            finding = Skew(cause.kind, probe, cause.what, cause.fix, 1, (), small, result(a, a_ids), result(b, b_ids))
            return cause.key, finding, explains

        inputs = [(each.where, each) for each in sorted(differing, key=lambda each: len(each.text))]
        return explain(inputs, _MOST_EXAMINED, examine, progress)

    def cause_of(self, text: str, a_ids: list[int], b_ids: list[int], *, special: bool = False) -> Cause:
        """Return why a text's ids differ. With `special`, the ids include BOS and EOS."""
        a, b = self._a.facts, self._b.facts
        if special or _differ_by_special_only(a_ids, b_ids, a, b):
            around = _special_cause(text, a_ids, b_ids, self._a, self._b)
            if special or around is not None:
                return around or Cause("unknown", _first_ids_apart(a_ids, b_ids), SAME_FILES, "unknown")
        exchangeable = self.tables or (a.spec is not None and b.spec is not None)
        cause = self._by_exchange(text, b_ids) if exchangeable else self._by_trial(text, a_ids, b_ids)
        return cause or self._by_input(text, a_ids, b_ids)

    def _by_exchange(self, text: str, b_ids: list[int]) -> Cause | None:
        a, b = self._a.facts, self._b.facts
        kinds: dict[str, Kind] = {name: tokenizer_parts.TABLES[name] for name in self.tables}
        if not kinds:
            parts = [name for name in self.differing if name not in ("post_processor", "decoder")]
            kinds = {name: tokenizer_parts.PARTS[name] for name in parts} | dict.fromkeys(self._added, "added token")
        names = list(kinds)

        def explains(group: Sequence[str]) -> bool:
            encoder = self._exchange(tuple(group))
            return encoder is not None and encoder([text])[0] == b_ids

        if not names:
            return self._by_library(text, b_ids)
        groups = (*combinations(names, 1), *combinations(names, 2))
        group = next(filter(explains, groups), None)
        if group is None and len(names) > 2 and explains(names):
            group = tuple(smallest(names, explains))
        if group is None:
            return None
        kind = kinds[group[0]]
        what = " and ".join(map(self.words, group))
        return Cause(kind, what, _fix(kind, a, b), "+".join(group), self._exchange(group))

    def _by_library(self, text: str, b_ids: list[int]) -> Cause | None:
        """Return the cause if both sides have the same tokenizer.json, and only one encodes as Hugging Face does."""
        a, b = self._a.facts, self._b.facts
        encoder = self._exchange(())
        plain = encoder([text])[0] if encoder is not None else None
        if plain not in (b_ids, self._a.encode([text])[0]):
            return None
        letter, side = ("A", a) if plain == b_ids else ("B", b)
        versions = ", ".join(f"{name} {number}" for name, number in side.versions.items())
        what = (
            f"tokenizer.json is equal on both sides, and `tokenizers` runs it as {'B' if letter == 'A' else 'A'} "
            f"does; {letter}, {side.kind} ({versions}), runs it differently"
        )
        pin = "Pin the same library versions on both sides."
        return Cause("library", what, pin if dict(a.versions) != dict(b.versions) else LOAD_THE_FILE, "library")

    def _exchange(self, names: tuple[str, ...]) -> Encoder | None:
        """Return an encoder that is A's tokenizer with B's parts `names`, or None if they don't fit together."""
        if self.tables and names not in self._exchanged:
            self._exchanged[names] = self._a.with_tables(names, self._b)
        elif names not in self._exchanged:
            spec, b = self._a.facts.spec or {}, self._b.facts.spec or {}
            for name in names:
                if name in self._added:
                    spec = tokenizer_parts.with_tokens(spec, self._b.facts, self._added[name])
                else:
                    spec = tokenizer_parts.with_part(spec, name, b)
            try:
                self._exchanged[names] = encoder_of(load_spec(spec))
            except TokenizerUnusable:
                self._exchanged[names] = None
        return self._exchanged[names]

    def _words_of(self, name: str) -> str:
        """Describe how a part, a table or a group of added tokens differs."""
        a, b = self._a.facts, self._b.facts
        if self.tables:
            return tokenizer_parts.table_words(name, a, b)
        if name in self._added:
            return tokenizer_parts.added_words(self._added[name], a, b)
        return tokenizer_parts.part_words(name, a, b)

    @cached_property
    def _tried(self) -> list[tuple[str, list[int], list[int]]]:
        """Some battery texts with the ids of A and B."""
        texts = [text for group in battery.texts().values() for text in group[:4]]
        # The flags of each added token: a cause that changes all tokens must not be named for one.
        texts += [
            text
            for token in {**self._a.facts.added, **self._b.facts.added}
            for text in (token, f" {token}a {token} ", f"{token}\u0338")
        ]
        return list(zip(texts, self._a.encode(texts), self._b.encode(texts), strict=True))

    @cached_property
    def _agreed(self) -> dict[str, list[int]]:
        """The ids of battery texts that both backends encode equally. A cause must not change them."""
        return {text: ids for text, ids, other_ids in self._tried if ids == other_ids}

    def _by_trial(self, text: str, a_ids: list[int], b_ids: list[int]) -> Cause | None:
        """Find a widely used part with which the known tokenizer.json gives the other backend's ids."""
        known_side, expected, gives = (self._a, b_ids, "b") if self._a.facts.spec is not None else (self._b, a_ids, "a")
        if known_side.facts.spec is None:
            return None
        for cause in self._known:
            if cause.gives == gives and cause.encoder and _gives(cause.encoder, [text], [expected]):
                return cause
        letter, other_letter = ("B", "A") if gives == "b" else ("A", "B")
        spelled = sorted((token for token in known_side.facts.added if token in text), key=len, reverse=True)
        around = [piece for piece in re.split("|".join(map(re.escape, spelled)), text) if piece] if spelled else []
        for kind, what, encoder in self._variants.of(text):
            if kind == "added token" and self._a.encode(around) != self._b.encode(around):
                continue  # the text around the token differs too, so the token is not the cause
            if _gives(encoder, [text], [expected]) and self._keeps_agreed(encoder):
                fix = _fix(kind, self._a.facts, self._b.facts)
                description = f"{letter} behaves as {other_letter} would with {what}"
                self._known.append(Cause(kind, description, fix, f"{kind}:{what}", encoder, gives))
                return self._known[-1]
        return None

    @cached_property
    def _variants(self) -> Variants:
        return Variants(self._a.facts.spec or self._b.facts.spec or {})

    def _keeps_agreed(self, encoder: Encoder) -> bool:
        """Return True if an encoder gives the expected ids for the battery texts that A and B encode equally."""
        return _gives(encoder, [*self._agreed], [*self._agreed.values()])

    def _by_input(self, text: str, a_ids: list[int], b_ids: list[int]) -> Cause:
        """Find the cause by changing and cutting the text. Return a cause of kind `unknown` if nothing fits."""
        a, b = self._a, self._b
        for letter, gives, plain, expected in (("B", "b", a, b_ids), ("A", "a", b, a_ids)):
            for kind, what, change in _CHANGES:
                encoder: Encoder = partial(_encode_changed, plain, change)
                if change(text) != text and _gives(encoder, [text], [expected]) and self._keeps_agreed(encoder):
                    return Cause(kind, f"{letter} {what}", SAME_FILES, f"{letter}:{what}", encoder, gives)
            side, longer = (b if gives == "b" else a), text * 3
            most = max(len(ids[1] if gives == "b" else ids[0]) for _, *ids in self._tried)
            for what, encoder in _cut(text, expected, a_ids, b_ids, plain, most):
                if (
                    _gives(encoder, [text], [expected])
                    and _gives(encoder, [longer], side.encode([longer]))
                    and self._keeps_agreed(encoder)
                ):
                    return Cause("truncation", f"{letter} {what}", _WHOLE, f"{letter}:{what}", encoder, gives)
        a_pieces, b_pieces = token_strings(a, a_ids), token_strings(b, b_ids)
        if a_pieces and a_pieces == b_pieces:
            return Cause("vocabulary", "the same tokens have different ids", SAME_FILES, "vocabulary")
        what = f"the sides give this text different tokens: {_first_ids_apart(a_ids, b_ids)}"
        if a_pieces and "".join(a_pieces) == "".join(b_pieces):
            what = f"the sides split this text into different tokens: {_first_ids_apart(a_ids, b_ids)}"
        return Cause("unknown", what, SAME_FILES, "unknown")


def _differ_by_special_only(a_ids: list[int], b_ids: list[int], a: BackendFacts, b: BackendFacts) -> bool:
    """Return True if the ids differ only by special tokens before or after them."""
    longer, shorter = sorted((a_ids, b_ids), key=len, reverse=True)
    start = _place(shorter, longer)
    if start is None or a_ids == b_ids:
        return False
    special = {token.id for facts in (a, b) for token in facts.added.values() if token.special}
    return special.issuperset([*longer[:start], *longer[start + len(shorter) :]])


def _place(part: Sequence[int], whole: Sequence[int]) -> int | None:
    places = range(len(whole) - len(part), -1, -1)
    return next((start for start in places if whole[start : start + len(part)] == part), None) if part else None


def _special_cause(text: str, a_ids: list[int], b_ids: list[int], a: Backend, b: Backend) -> Cause | None:
    def around(backend: Backend, ids: list[int]) -> str:
        plain = backend.encode([text])[0]
        start = _place(plain, ids) if plain else len(ids)
        if start is None:
            return "different tokens around"
        sides = {"before": ids[:start], "after": ids[start + len(plain) :]}
        parts = [
            f"{' '.join(backend.token(i) or str(i) for i in some)} {where}" for where, some in sides.items() if some
        ]
        return " and ".join(parts) or "nothing around"

    a_words, b_words = around(a, a_ids), around(b, b_ids)
    if a_words == b_words:
        return None
    return Cause(
        "BOS/EOS",
        f"A puts {a_words} the text, B {b_words}",
        "Add BOS and EOS in one place. A rendered chat template has them: encode it with add_special_tokens=False.",
        f"special:{a_words}:{b_words}",
    )


def _fix(kind: Kind, a: BackendFacts, b: BackendFacts) -> str:
    if any("GGUF" in facts.kind or "llama.cpp" in facts.kind for facts in (a, b)):
        if kind == "pre-tokenizer":
            return (
                "Convert the GGUF with a converter that knows this model: tokenizer.ggml.pre names a different split."
            )
        own = [(facts.spec or {}).get("normalizer") for facts in (a, b) if "GGUF" in facts.kind]
        if kind == "normalizer" and not any(own):
            return (
                "llama.cpp does not normalize text for such a vocabulary: normalize it before it reaches either side."
            )
        if kind == "added token":
            return "Compare the token's flags and tokenizer.ggml.token_type; llama.cpp chooses some types by name."
    return SAME_FILES if a.kind == b.kind else LOAD_THE_FILE


def _gives(encoder: Encoder, texts: list[str], expected: list[list[int]]) -> bool:
    try:
        return encoder(texts) == expected
    except InvalidRequest:
        return False


def _encode_changed(plain: Backend, change: Callable[[str], str], texts: Sequence[str]) -> list[list[int]]:
    return plain.encode([change(text) for text in texts])


_CHANGES: tuple[tuple[Kind, str, Callable[[str], str]], ...] = (
    ("pre-tokenizer", "puts a space before the text (add_prefix_space, add_dummy_prefix)", lambda text: f" {text}"),
    ("pre-tokenizer", "removes a space before the text", lambda text: text.removeprefix(" ")),
    *(("normalizer", f"reads text {what}", change) for what, change in OF_TEXT),
)


def _cut(
    text: str, expected: list[int], a_ids: list[int], b_ids: list[int], plain: Backend, most: int
) -> Iterator[tuple[str, Encoder]]:
    """Yield descriptions and encoders that cut `plain`'s ids or text. `most`: the cutting side's most ids so far."""
    limit = len(expected)

    def kept(part: slice, texts: Sequence[str]) -> list[list[int]]:
        return [ids[part] for ids in plain.encode(list(texts))]

    def in_pieces(size: int, texts: Sequence[str]) -> list[list[int]]:
        pieces = [[whole[start : start + size] for start in range(0, len(whole), size)] for whole in texts]
        return [[i for ids in plain.encode(some) for i in ids] if some else [] for some in pieces]

    if most <= limit < len(b_ids if expected is a_ids else a_ids):
        yield f"cuts texts to their first {limit} ids", partial(kept, slice(limit))
        yield f"cuts texts to their last {limit} ids", partial(kept, slice(-limit, None))
    shared = first_difference(a_ids, b_ids)
    about = len(plain.decode([expected[:shared]])[0]) if shared and "decode" in plain.facts.abilities else 0
    for size in range(max(about - _AROUND, 2), min(about + _AROUND, len(text))):
        yield f"encodes texts in pieces of {size} characters", partial(in_pieces, size)


def _first_ids_apart(a_ids: list[int], b_ids: list[int]) -> str:
    index = first_difference(a_ids, b_ids)
    shown = [str(ids[index]) if index < len(ids) else "no id" for ids in (a_ids, b_ids)]
    return f"the first ids that differ, at {index}, are {shown[0]} and {shown[1]}"


def encoder_of(tokenizer: tokenizers.Tokenizer) -> Encoder:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    return encode


class Variants:
    """Variants of a known tokenizer, each with one change, built on first use."""

    def __init__(self, spec: tokenizer_parts.Spec) -> None:
        self._spec = spec
        self._made: dict[str, Encoder] = {}

    def of(self, text: str) -> Iterator[tuple[Kind, str, Encoder]]:
        """Yield the kind, description and encoder of each variant that may matter for a text."""
        for what, part in tokenizer_parts.NORMALIZERS.items():
            yield "normalizer", what, partial(self._swapped, {"normalizer": part})
        for what, part in tokenizer_parts.pre_tokenizers(self._spec).items():
            yield "pre-tokenizer", what, partial(self._swapped, {"pre_tokenizer": part})
        for what, steps in () if tokenizer_parts.is_byte_level(self._spec) else tokenizer_parts.SENTENCEPIECE.items():
            changes = {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None}
            yield "pre-tokenizer", what, partial(self._swapped, changes)
        added = self._spec.get("added_tokens") or []
        for what, tokens in _added_variants(added, text).items():
            if tokens != added:
                yield "added token", what, self._loaded(what, added_tokens=tokens)
        model = self._spec["model"]
        if model["type"] == "BPE":
            value = not model.get("ignore_merges")
            what = f"ignore_merges={value}"
            yield "model settings", what, self._loaded(what, model={**model, "ignore_merges": value})

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        return load_spec(self._spec)

    def _swapped(self, parts: Mapping[str, Any], texts: Sequence[str]) -> list[list[int]]:
        """Swap parts of the loaded tokenizer, encode, and restore its parts, because loading a tokenizer is slow."""
        own = {name: getattr(self._tokenizer, name) for name in parts}
        try:
            for name, part in parts.items():
                value = None if part is None else getattr(tokenizer_parts.with_only(name, part), name)
                setattr(self._tokenizer, name, value)
            return encoder_of(self._tokenizer)(texts)
        finally:
            for name, part in own.items():
                setattr(self._tokenizer, name, part)

    def _loaded(self, what: str, **changed: Any) -> Encoder:
        if what not in self._made:
            self._made[what] = encoder_of(load_spec({**self._spec, **changed}))
        return self._made[what]


def _added_variants(added: list[Any], text: str) -> dict[str, list[Any]]:
    spelled = [token["content"] for token in added if token["content"] in text][:_MOST_SPELLED]
    changes = {f"{content!r} read as text": [t for t in added if t["content"] != content] for content in spelled}
    changes["its added tokens read as text"] = []
    changes["only those of its added tokens that are special"] = [token for token in added if token["special"]]
    for flag in ("lstrip", "rstrip", "single_word", "normalized"):
        for value in (True, False):
            changes[f"{flag}={value} on its added tokens"] = [{**token, flag: value} for token in added]
    changes["lstrip=True and rstrip=True on its added tokens"] = [{**t, "lstrip": True, "rstrip": True} for t in added]
    for token in (token for token in added if token["content"] in spelled):
        for flags in (("lstrip",), ("rstrip",), ("lstrip", "rstrip"), ("single_word",), ("normalized",)):
            other = {flag: not token.get(flag) for flag in flags}
            what = " and ".join(f"{flag}={value}" for flag, value in other.items())
            changes[f"{what} on {token['content']!r}"] = [{**t, **other} if t is token else t for t in added]
    return changes
