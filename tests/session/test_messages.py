from __future__ import annotations

import pytest

from tests.session.builders import user
from tokentape._canonical import canonical_json
from tokentape._session import messages
from tokentape._session.messages import SharedMessages
from tokentape.types import Message


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


@pytest.mark.parametrize("before", [[], [user("é"), user('"],[')]])
def test_messages_that_differ_in_the_last_one_are_encoded_from_there(before: list[Message]) -> None:
    first, second = SharedMessages([*before, user("one")]), SharedMessages([*before, user("two, é")])
    first.canonical()
    second.begin_like(first)
    assert second._canonical == canonical_json([*before, user("two, é")]).encode()


def test_messages_are_encoded_whole_if_those_alike_are_not_kept() -> None:
    second = SharedMessages([user("two")])
    second.begin_like(SharedMessages([user("one")]))
    assert second.canonical() == canonical_json([user("two")]).encode()


def test_messages_that_many_sessions_begin_like_stay_encoded() -> None:
    first = SharedMessages([user("é"), user("?")])
    first.canonical()
    for n in range(100):
        SharedMessages([user("é"), user(str(n))]).begin_like(first)
    assert first._canonical is not None
