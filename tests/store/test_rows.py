from __future__ import annotations

import json
import zlib

import pytest

from tests.session.builders import user
from tokentape._session.messages import SharedMessages
from tokentape.store import _rows


def test_openings_that_differ_in_the_last_message_are_compressed_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rows, "_opening", None)
    context = [user(f"{n} é" * 1000) for n in range(40)]
    openings = [[*context, user("one")], [*context, user("two")], [user("other"), *context], [*context, user("one")]]
    rows = []
    for opening in openings:
        rows.append(_rows._deflate_messages(SharedMessages(opening)))
        assert json.loads(zlib.decompress(rows[-1])) == opening
    kept = _rows._opening
    assert rows[0] == rows[3]
    assert _rows._deflate_messages(SharedMessages(openings[1])) == rows[1]
    assert _rows._opening is kept
