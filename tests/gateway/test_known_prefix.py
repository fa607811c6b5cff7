"""Bodies that begin with the bytes of an earlier request: which prefix is reused, and that the rest suffices."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.gateway.scripted import ScriptedEngine
from tests.waiting import PATIENCE
from tokentape._session.chain import turn_digest
from tokentape._session.messages import SharedMessages
from tokentape.chat._renderer import Renderer
from tokentape.gateway._app import create_app
from tokentape.gateway._http import check_count
from tokentape.gateway._prefix import ParsedPrefix, RequestBody
from tokentape.gateway._serve import running
from tokentape.gateway._session_cache import SessionCache
from tokentape.gateway._turns import Turns
from tokentape.gateway._wire import chat_completions
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


@given(
    st.lists(MESSAGE, min_size=1, max_size=4),
    st.lists(MESSAGE, min_size=1, max_size=3),
    FIELDS,
    FIELDS,
    SPACE,
    st.sampled_from([None, SharedMessages()]),
)
def test_unread_part_has_the_new_messages_and_all_other_fields(
    old: list[Any],
    new: list[Any],
    before: dict[str, Any],
    after: dict[str, Any],
    space: tuple[str, str],
    known: SharedMessages | None,
) -> None:
    after = {f"z{name}": value for name, value in after.items()}
    first, second = write(old, before, {}, space), write([*old, *new], before, after, space)
    body = RequestBody(second, [structs.replace(seen(first), known=known)])
    assert body.prefix is not None
    unread = msgspec.json.decode(body.unread)
    assert unread == {**before, "messages": new, **after}
    # And the next request is known by the place that this one's messages have.
    place, whole = body.span(), RequestBody(second).span()
    assert place is not None
    assert whole is not None
    assert place == (whole if known is not None else structs.replace(whole, before=None))
    assert place.digest == hashlib.sha256(second[: place.end]).digest()


@given(st.lists(MESSAGE, min_size=2, max_size=4), FIELDS, FIELDS, SPACE)
def test_span_of_all_messages_but_the_last_is_that_of_a_body_that_ends_there(
    messages: list[Any], before: dict[str, Any], after: dict[str, Any], space: tuple[str, str]
) -> None:
    after = {f"z{name}": value for name, value in after.items()}
    shorter = RequestBody(write(messages[:-1], before, {}, space)).span()
    place = RequestBody(write(messages, before, after, space)).span()
    assert place is not None
    assert shorter is not None
    assert place.before == structs.replace(shorter, before=None)


def test_count_of_all_messages_but_the_last_leaves_out_its_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts}, {"role": "user", "content": [*parts, *parts]}]}
    counted = partial(check_count, lists=(), parts=("content",))
    place = RequestBody(json.dumps(body).encode()).span(counted(body), counted)
    assert place is not None
    assert place.before is not None
    assert (place.count, place.before.count) == (8, 3)


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
    monkeypatch.setattr(Turns, "prefixes", lambda *_: ())
    with SqliteStore.open(tmp_path / "read") as store:
        assert recorded(renderer, store, follow_ups) == turns
    assert [parent for parent, _, _ in turns[:4]] == [None, 0, 1, 2]
    assert len({fork for _, fork, _ in turns}) > 2


QUESTIONS = [
    history([], 0, {"role": "assistant", "content": "é"}, {"role": "user", "content": "<|im_end|> 1"}),
    history([], 0, {"role": "assistant", "content": "é"}, {"role": "user", "content": "<|im_end|> 1"}),
    history([], 0, {"role": "assistant", "content": "é"}, {"role": "user", "content": "another 2.50"}),
    history([], 0, {"role": "assistant", "content": "other"}, {"role": "user", "content": "another 2.50"}),
    history([], 0, {"role": "assistant", "content": "é"}, *[{"role": "user", "content": "more"}] * 2),
    history([], 0, {"role": "assistant", "content": "é"}),
]


def first_calls(renderer: Renderer, path: Path, bodies: list[Any]) -> tuple[list[Any], list[httpx2.Response]]:
    """Return the prompt and the turn of each body, the first of its own session, and the answers."""
    engine, answers, found = ScriptedEngine(renderer, [CALL] * len(bodies)), list[httpx2.Response](), list[Any]()
    store = SqliteStore.open(path)
    with running(create_app(Turns(engine, renderer, store), model_id="m")) as url, httpx2.Client() as http:
        for n, body in enumerate(bodies):
            answers.append(http.post(f"{url}/sessions/{n}/v1/chat/completions", json=body, timeout=PATIENCE))
        turns = [store.load_session(str(n)).turns[0] for n in range(len(bodies))]
    for (prompt, _), turn in zip(engine.requests, turns, strict=True):
        found.append((prompt, turn.messages, turn.added_ids.tolist(), turn.added_provenance.tolist(), turn.fork))
        assert turn_digest(turn, None) == turn.digest
    return found, answers


def test_first_bodies_that_begin_alike_do_not_change_the_record(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [{"messages": messages, "tools": TOOLS} for messages in QUESTIONS]
    alike, _ = first_calls(renderer, tmp_path / "alike", bodies)
    monkeypatch.setattr(Turns, "prefixes", lambda *_: ())
    apart, _ = first_calls(renderer, tmp_path / "apart", bodies)
    assert alike == apart
    assert [list(messages) for _, messages, *_ in alike] == QUESTIONS


def test_only_the_messages_after_a_common_beginning_are_decoded(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, decoded = chat_completions._message, list[int]()
    monkeypatch.setattr(chat_completions, "_message", lambda *args: decoded.append(args[0]) or decode(*args))
    first_calls(renderer, tmp_path, [{"messages": messages, "tools": TOOLS} for messages in QUESTIONS])
    # The fourth body has another third message, and the fifth has two messages after the common beginning.
    assert decoded == [0, 1, 2, 3, 0, 0, 0, 1, 2, 3, 0, 1, 0, 1, 2]


def test_ignored_fields_of_messages_are_named_in_every_session(renderer: Renderer, tmp_path: Path) -> None:
    messages = [{**message, "mood": "good"} if n == 1 else message for n, message in enumerate(QUESTIONS[0])]
    _, answers = first_calls(renderer, tmp_path, [{"messages": messages}] * 2)
    assert [answer.headers["X-Tokentape-Ignored-Params"] for answer in answers] == ["messages.mood"] * 2


def test_kept_prefixes_are_limited_by_all_messages_that_they_keep(renderer: Renderer, tmp_path: Path) -> None:
    """The last message of a first body is kept with its prefix, and can be much longer."""
    engine, long = ScriptedEngine(renderer, [CALL] * 3), "apple " * 100_000
    with SqliteStore.open(tmp_path) as store:
        turns = Turns(engine, renderer, store)
        prefixes = turns._prompts.prefixes
        prefixes._most = 1 << 20
        with running(create_app(turns, model_id="m")) as url, httpx2.Client() as http:
            for n in range(3):
                messages = [{"role": "system", "content": str(n)}, {"role": "user", "content": long}]
                http.post(f"{url}/sessions/{n}/v1/chat/completions", json={"messages": messages}, timeout=PATIENCE)
    kept = sum(len(message["content"]) for prefix in prefixes.values() for message in prefix.known or ())
    assert 0 < kept <= 1 << 20


def test_ignored_fields_of_a_call_in_flight_are_named_in_other_sessions(renderer: Renderer, tmp_path: Path) -> None:
    """A second first call of its session begins with the same messages, which are not read again."""
    odd, more = [{**QUESTIONS[0][0], "mood": "good"}, QUESTIONS[0][1]], {"role": "user", "content": "more"}
    engine = ScriptedEngine(renderer, [CALL] * 3)
    engine.gate = Event()
    with SqliteStore.open(tmp_path) as store, ThreadPoolExecutor() as threads:
        app = create_app(Turns(engine, renderer, store), model_id="m")
        with running(app) as url, httpx2.Client(timeout=PATIENCE) as http:

            def send(session: str, messages: list[Any]) -> Future[httpx2.Response]:
                engine.called.clear()
                call = threads.submit(
                    http.post, f"{url}/sessions/{session}/v1/chat/completions", json={"messages": messages}
                )
                assert engine.called.wait(PATIENCE)
                return call

            try:
                calls = [send("a", odd), send("a", [*odd, more, more]), send("b", [*odd, more, more])]
            finally:
                engine.gate.set()
            assert [call.result().status_code for call in calls] == [200] * 3
    assert calls[2].result().headers["X-Tokentape-Ignored-Params"] == "messages.mood"
