"""Audits make a new tokenizer per test; proofs of its twin and certificates are tested elsewhere.

Fewer conversations are compared, too; the catalogue of known bugs is tried with all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import pytest

from tokentape.audit._skew import battery
from tokentape.audit._skew.backends import spec as spec_backend


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_models: None) -> None: ...


@pytest.fixture(scope="session", autouse=True)
def _texts_of_a_tokenizer_are_made_and_encoded_once() -> Any:
    """Most audits have the same healthy side, make the same texts for it, and encode them."""

    def once(make: Callable[..., Iterable[str]]) -> Callable[..., dict[str, None]]:
        made: dict[tuple[int, ...], tuple[object, dict[str, None]]] = {}

        def texts(*specs: Any) -> dict[str, None]:
            key = tuple(map(id, specs))
            if key not in made:
                if len(made) == 8:
                    made.clear()
                made[key] = specs, dict.fromkeys(make(*specs))  # Kept, so that no other one gets its id.
            return dict(made[key][1])

        return texts

    load, encode = spec_backend.load_spec, spec_backend.SpecBackend.encode

    @lru_cache(8)
    def loaded(text: str) -> Any:
        return load({}, text)

    @lru_cache(16)
    def known(tokenizer: Any, special: bool) -> dict[str, list[int]]:
        return {}

    def encoded(self: Any, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        ids = known(self._tokenizer, special)
        if new := [text for text in texts if text not in ids]:
            ids.update(zip(new, encode(self, new, special=special), strict=True))
        return [ids[text] for text in texts]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            spec_backend, "load_spec", lambda spec, text=None: loaded(text or json.dumps(spec, ensure_ascii=False))
        )
        patch.setattr(spec_backend.SpecBackend, "encode", encoded)
        for name in ("_competing_texts", "vocabulary_texts"):
            patch.setattr(battery, name, once(getattr(battery, name)))
        yield
