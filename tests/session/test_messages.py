from __future__ import annotations

import pytest

from tests.session.builders import user
from tokentape._canonical import canonical_json
from tokentape._session import messages
from tokentape._session.messages import SharedMessages


def test_shared_messages_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedMessages([user("é"), user("?")])
    assert shared.canonical() == canonical_json([user("é"), user("?")]).encode()
    monkeypatch.delattr(messages, "canonical_json")
    assert shared.canonical()


def test_only_a_few_shared_messages_keep_their_text() -> None:
    shared = [SharedMessages([user(str(n))]) for n in range(100)]
    for opening in shared:
        opening.canonical()
    assert sum(opening._canonical is not None for opening in shared) <= 16
