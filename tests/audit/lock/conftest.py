"""Locks are made of a new tokenizer or template per test; what is certified of them is tried elsewhere."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick_too(quick_models: None) -> None: ...
