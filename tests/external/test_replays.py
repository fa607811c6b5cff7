"""Conversations of other projects, replayed on every available template; see `replay`."""

from __future__ import annotations

from functools import cache

import pytest

from tests.external import ledger, suites
from tests.external.pairs import TEMPLATES, load_pair, setup_for
from tests.external.replay import Outcome, replay

CASES = [(suite, template) for template in TEMPLATES for suite in suites.REPLAYED]


@cache
def conversations(suite: str) -> list[suites.Conversation]:
    read, every = suites.REPLAYED[suite]
    return list(read())[::every]


def outcomes(suite: str, template: str) -> list[Outcome]:
    """Return all outcomes of a suite on a template."""
    pair = load_pair(template)
    return [
        outcome
        for conversation in conversations(suite)
        for outcome in replay(pair, conversation, setup_for(pair, tuple(conversation.tools)))
    ]


@pytest.mark.parametrize(("suite", "template"), CASES)
def test_differences_are_explained(suite: str, template: str) -> None:
    ledger.check(suite, template, outcomes(suite, template))
