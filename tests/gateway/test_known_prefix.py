"""Bodies that begin with the bytes of an earlier request: which prefix is reused, and that the rest suffices."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.scripted import ScriptedEngine
from tests.waiting import PATIENCE
from tokentape.chat._renderer import Renderer
from tokentape.gateway._app import create_app
from tokentape.gateway._prefix import ParsedPrefix, RequestBody
from tokentape.gateway._serve import running
from tokentape.gateway._session_cache import SessionCache
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

TEXT = st.text(st.sampled_from('a"\\],[{}: \n\té😀'), max_size=8)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXT})
FIELDS = st.dictionaries(st.sampled_from(["model", "n", "metadata"]), st.one_of(TEXT, st.lists(MESSAGE)), max_size=3)
SPACE = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])


def write(messages: list[Any], before: dict[str, Any], after: dict[str, Any], space: tuple[str, str]) -> bytes:
    return json.dumps({**before, "messages": messages, **after}, separators=space).encode()


def seen(data: bytes) -> ParsedPrefix:
    place = RequestBody(data).span()
    assert place is not None
    return ParsedPrefix(place, "setup", b"key")


@given(st.lists(MESSAGE, min_size=1, max_size=4), st.lists(MESSAGE, min_size=1, max_size=3), FIELDS, FIELDS, SPACE)
def test_unread_part_has_the_new_messages_and_all_other_fields(
    old: list[Any], new: list[Any], before: dict[str, Any], after: dict[str, Any], space: tuple[str, str]
) -> None:
    after = {f"z{name}": value for name, value in after.items()}
    first, second = write(old, before, {}, space), write([*old, *new], before, after, space)
    body = RequestBody(second, [seen(first)])
    assert body.prefix is not None
    unread = msgspec.json.decode(body.unread)
    assert unread == {**before, "messages": new, **after}
    # And the next request is known by the place that this one's messages have.
    place = body.span()
    assert place == RequestBody(second).span()
    assert place is not None
    assert place.digest == hashlib.sha256(second[: place.end]).digest()


@given(st.lists(MESSAGE, min_size=1, max_size=4), st.lists(MESSAGE, min_size=1, max_size=3), st.data())
def test_changed_prefix_is_not_reused(old: list[Any], new: list[Any], data: st.DataObject) -> None:
    known = seen(write(old, {}, {}, (",", ":")))
    second = bytearray(write([*old, *new], {}, {}, (",", ":")))
    at = data.draw(st.integers(0, known.span.end - 1))
    second[at] ^= 1
    assert RequestBody(bytes(second), [known]).prefix is None


def test_body_without_new_messages_is_parsed_in_full() -> None:
    first = write([{"role": "user", "content": "hi"}], {}, {}, (",", ":"))
    body = RequestBody(first, [seen(first)])
    assert body.prefix is None
    assert body.unread == first


def test_longest_known_prefix_is_used() -> None:
    messages = [{"role": "user", "content": str(n)} for n in range(4)]
    known = [seen(write(messages[:n], {}, {}, (",", ":"))) for n in (3, 1, 2)]
    body = RequestBody(write(messages, {}, {}, (",", ":")), known)
    assert msgspec.json.decode(body.unread)["messages"] == messages[3:]


@pytest.mark.parametrize("rest", [b'"messages":[{"role":"user"}]', b'"x":1,"\\u006dessages":[{"role":"user"}]'])
def test_duplicate_messages_fields_use_no_known_prefix(rest: bytes) -> None:
    old = b'{"messages":[{"role":"system"}'
    body = RequestBody(old + b',{"role":"user"}],' + rest + b"}", [seen(old + b"]}")])
    assert body.prefix is not None
    assert body.span() is None


def test_list_equal_to_the_messages_is_not_mistaken_for_them() -> None:
    messages = [{"role": "user", "content": "hi"}]
    data = write(messages, {"metadata": {"kept": messages}}, {}, (",", ":"))
    place = RequestBody(data).span()
    assert place is not None
    assert data[: place.head].endswith(b'"messages":[')


def test_digest_covers_path_and_body_for_any_known_prefix() -> None:
    first = write([{"role": "user", "content": "1"}], {}, {}, (",", ":"))
    second = write([{"role": "user", "content": "1"}, {"role": "user", "content": "2"}], {}, {}, (",", ":"))
    body = RequestBody(second, [seen(first)])
    body.span()
    assert body.digest("/v1/x") == RequestBody(second).digest("/v1/x") != RequestBody(second).digest("/v1/y")


CALL = '<think>\nhm\n</think>\n\nOne moment.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def recorded(renderer: Renderer, store: SqliteStore, follow_ups: list[Any]) -> list[tuple[Any, ...]]:
    """What a session's turns are recorded as. Each of `follow_ups` makes a body of the replies so far."""
    engine = ScriptedEngine(renderer, [CALL] * len(follow_ups), sampling=ScriptedEngine.EVERYTHING)
    replies: list[Any] = []
    with running(create_app(Turns(engine, renderer, store), model_id="m")) as url, httpx2.Client() as http:
        for follow_up in follow_ups:
            answer = http.post(f"{url}/sessions/s/v1/chat/completions", json=follow_up(replies), timeout=PATIENCE)
            assert answer.status_code == 200, answer.text
            replies.append(answer.json()["choices"][0]["message"])
        turns = http.get(f"{url}/sessions/s").json()["turns"]
    prompts = [prompt for prompt, _ in engine.requests]
    return [(turn["parent"], turn["fork"], prompt) for turn, prompt in zip(turns, prompts, strict=True)]


def history(replies: list[Any], turns: int, *more: Any) -> list[Any]:
    """The first question, a number of replies with the results of their calls, and more."""
    messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    for n, reply in enumerate(replies[:turns]):
        messages += [reply, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": f"{n}"}]
    return [*messages, *more]


def test_known_prefixes_do_not_change_the_record(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, assistant = {"role": "user", "content": "and"}, {"role": "assistant", "content": "not sampled"}
    follow_ups = [
        *(lambda replies, n=n: {"messages": history(replies, n), "tools": TOOLS} for n in range(4)),
        lambda replies: {"messages": history(replies, 1, user), "tools": TOOLS},
        lambda replies: {"messages": [user, *history(replies, 3)[2:]], "tools": TOOLS},
        lambda replies: {"messages": history(replies, 3, assistant, user)},
        lambda replies: {"messages": history(replies, 3), "tools": TOOLS},
        lambda replies: {"messages": history(replies, 3, replies[3], user), "tools": TOOLS, "max_tokens": 99},
        lambda replies: {"messages": history(replies, 2, assistant, user), "tools": TOOLS},
    ]
    known, counted = SessionCache.prefixes, []

    def counting(self: SessionCache, session_id: str, owner: str) -> Any:
        counted.append(len(known(self, session_id, owner)))
        return known(self, session_id, owner)

    monkeypatch.setattr(SessionCache, "prefixes", counting)
    with SqliteStore.open(tmp_path / "known") as store:
        turns = recorded(renderer, store, follow_ups)
    assert max(counted) == 4
    monkeypatch.setattr(SessionCache, "prefixes", lambda *_: ())
    with SqliteStore.open(tmp_path / "read") as store:
        assert recorded(renderer, store, follow_ups) == turns
    assert [parent for parent, _, _ in turns[:4]] == [None, 0, 1, 2]
    assert len({fork for _, fork, _ in turns}) > 2
