from __future__ import annotations

import json
import zlib

from tests.session.builders import user
from tokentape._session.messages import SharedMessages
from tokentape.store import _rows


def test_openings_that_differ_in_the_last_message_are_compressed_from_there() -> None:
    _rows._compressed_so_far.cache_clear()
    context = [user(f"{n} é" * 1000) for n in range(40)]
    openings = [[*context, user("one")], [*context, user("two")], [user("other"), *context], [*context, user("one")]]
    rows = []
    for opening in openings:
        rows.append(_rows._deflate_messages(SharedMessages(opening)))
        assert json.loads(zlib.decompress(rows[-1])) == opening
    assert rows[0] == rows[3]
    assert _rows._compressed_so_far.cache_info().hits == 1
