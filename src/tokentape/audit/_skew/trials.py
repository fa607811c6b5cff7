"""Variants of a tokenizer.json with one part changed as servers and converters change it, to try on a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import tokenizers

from tokentape.audit._skew.backends.spec import load_spec
from tokentape.audit._skew.findings import Encoder, Kind
from tokentape.audit._skew.known_parts import SENTENCEPIECE, is_byte_level, normalizers, pre_tokenizers
from tokentape.audit._skew.spec_parts import Spec, with_only

_MOST_SPELLED = 2


def encoder_of(tokenizer: tokenizers.Tokenizer) -> Encoder:
    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    return encode


class Trials:
    """Variants of a known tokenizer, with one thing changed at a time. Each is made when first needed."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._made: dict[str, Encoder] = {}

    def of(self, text: str) -> Iterator[tuple[Kind, str, Encoder]]:
        """Yield kind, description and encoder of each variant that may matter for a text."""
        for what, part in normalizers().items():
            yield "normalizer", what, partial(self._swapped, {"normalizer": part})
        for what, part in pre_tokenizers(self._spec).items():
            yield "pre-tokenizer", what, partial(self._swapped, {"pre_tokenizer": part})
        for what, (normalizer, pre_tokenizer) in () if is_byte_level(self._spec) else SENTENCEPIECE.items():
            both = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
            yield "pre-tokenizer", what, partial(self._swapped, both)
        added = self._spec.get("added_tokens") or []
        for what, tokens in _added_trials(added, text).items():
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
        """Encode with other parts in the one tokenizer, and put its own back: loading another one is slow."""
        own = {name: getattr(self._tokenizer, name) for name in parts}
        try:
            for name, part in parts.items():
                setattr(self._tokenizer, name, None if part is None else getattr(with_only(name, part), name))
            return encoder_of(self._tokenizer)(texts)
        finally:
            for name, part in own.items():
                setattr(self._tokenizer, name, part)

    def _loaded(self, what: str, **changed: Any) -> Encoder:
        if what not in self._made:
            self._made[what] = encoder_of(load_spec({**self._spec, **changed}))
        return self._made[what]


def _added_trials(added: list[Any], text: str) -> dict[str, list[Any]]:
    spelled = [token["content"] for token in added if token["content"] in text]
    changes = {
        **{f"{one!r} read as text": [t for t in added if t["content"] != one] for one in spelled[:_MOST_SPELLED]},
        "its added tokens read as text": [],
        "only those of its added tokens that are special": [token for token in added if token["special"]],
    }
    for flag in ("lstrip", "rstrip", "normalized", "single_word"):
        for value in (True, False):
            changes[f"{flag}={value} on its added tokens"] = [{**token, flag: value} for token in added]
    changes["lstrip=True and rstrip=True on its added tokens"] = [{**t, "lstrip": True, "rstrip": True} for t in added]
    return changes
