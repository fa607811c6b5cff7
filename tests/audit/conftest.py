"""Audits and locks make a new tokenizer or template per test; what is certified of them is tried elsewhere."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_models: None) -> None: ...
