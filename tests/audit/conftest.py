"""Audits make a new tokenizer per test; what is proved of its twin is tried elsewhere."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_proofs: None) -> None: ...
