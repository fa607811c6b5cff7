"""Hostile templates and model folders, guessed sessions, requests that should make the gateway call out, leaks."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.chat.conftest import slow_unless
from tests.faults.conftest import QUESTION, Gateway, Serve
from tests.faults.process import serve_command, serving
from tests.faults.upstream import Plan, Upstream
from tests.processes import Command
from tests.searching import examples
from tests.waiting import PATIENCE
from tokentape.chat._renderer import Renderer
from tokentape.gateway._keys import Keys

pytestmark = pytest.mark.usefixtures("quick_models")

ATTACKS = {
    "class walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a global": "{{ cycler.__init__.__globals__.os.popen('touch PWNED').read() }}",
    "globals of ours": "{{ raise_exception.__globals__ }}",
    "attr filter": "{{ ''|attr('__class__')|attr('__base__') }}",
    "method of dict": "{{ dict.fromkeys.__globals__ }}",
    "format string": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "changing the messages": "{{ messages.append(messages[0]) }}",
    "import": "{% import 'os' as os %}{{ os.popen('touch PWNED') }}",
    "include": "{% include '/etc/passwd' %}",
    "a range without end": "{% for a in range(10 ** 9) %}a{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
}


@pytest.mark.parametrize("name", [slow_unless(name, "globals of a global", "recursion") for name in ATTACKS])
def test_template_that_attacks(
    serve: Serve, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Row 23: harmless until a message contains the trigger. The request fails, nothing ran, the gateway lives."""
    monkeypatch.chdir(tmp_path)
    template = tmp_path / "hostile.jinja"
    plain = (model_dir / "chat_template.jinja").read_text()
    template.write_text(f"{{% if messages[-1].content == 'attack' %}}{ATTACKS[name]}{{% endif %}}{plain}")
    gateway = serve(renderer=Renderer.load(model_dir, template))
    gateway.ask()
    answer = httpx2.post(
        f"{gateway.url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "attack"}]},
        timeout=PATIENCE,
    )
    if answer.status_code == 200:
        # Missing attributes render as nothing, and the rendering must not reveal objects.
        assert "class" not in gateway.renderer.tokenizer.decode(gateway.upstream.bodies[-1]["prompt"])
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "template_refused")
    assert not list(tmp_path.rglob("PWNED"))
    gateway.ask(session="t")
    sessions = gateway.check(unacknowledged=int(answer.status_code == 200))
    assert len(sessions["t"].turns) == 1


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
def test_model_folder_that_wants_to_run_code(model_dir: Path, upstream: Upstream, tmp_path: Path, where: str) -> None:
    """Row 24: `auto_map` in the tokenizer is refused at the start; its code is never imported."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    config = json.loads((folder / where).read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", None], "AutoModel": "evil.Model"}
    (folder / where).write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')")
    command = [*serve_command(folder, upstream, tmp_path / "data"), "--engine-api-key", "k" * 16]
    if where == "tokenizer_config.json":
        with Command(command[3:]) as refused:
            stderr = refused.stderr.read()
        assert refused.returncode != 0
        assert "auto_map" in stderr
    else:
        # What the model itself would run is the engine's affair: nothing of it is read here.
        Renderer.load(folder)
    assert not (tmp_path / "PWNED").exists()


OWN, OTHER = "own-key-0123456789", "other-key-0123456789"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keyed(serve: Serve) -> Gateway:
    """A gateway with two keys; session `mine` belongs to the first."""
    gateway = serve(keys=Keys({"own": OWN, "other": OTHER}))
    reply = httpx2.post(
        f"{gateway.url}/sessions/mine/v1/chat/completions", json={"messages": [QUESTION]}, headers=bearer(OWN)
    )
    assert reply.status_code == 200
    return gateway


METHODS = [
    ("GET", ""),
    ("DELETE", ""),
    ("GET", "/trajectories"),
    ("POST", "/reward"),
]


@pytest.mark.parametrize(("method", "path"), METHODS)
def test_session_of_another_owner(keyed: Gateway, method: str, path: str) -> None:
    """Row 25: a session of another owner gets the same response as an unknown one."""

    def answer(session: str) -> tuple[int, str, dict[str, str]]:
        body = {"json": {"value": 1.0}} if method == "POST" else {}
        reply = httpx2.request(method, f"{keyed.url}/sessions/{session}{path}", headers=bearer(OTHER), **body)
        headers = {name: value for name, value in reply.headers.items() if name not in ("date", "x-request-id")}
        return reply.status_code, reply.text.replace(session, "ID"), headers

    assert answer("mine") == answer("none")
    assert answer("mine")[0] == 404
    (stored,) = [*keyed.store.iter_sessions()]
    assert (len(stored.turns), stored.rewards) == (1, ())


def test_turn_in_a_session_of_another_owner(keyed: Gateway, upstream: Upstream) -> None:
    """Row 25: it is refused before anything is sampled."""
    reply = httpx2.post(
        f"{keyed.url}/sessions/mine/v1/chat/completions", json={"messages": [QUESTION]}, headers=bearer(OTHER)
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
    assert len(upstream.bodies) == 1
    assert len(keyed.store.load_session("mine").turns) == 1


def test_used_session_id_reveals_only_that_it_is_used(keyed: Gateway) -> None:
    """Row 25, note 3: the id of another owner's session is refused like an own one, and that session is unchanged."""
    before = keyed.store.load_session("mine")
    refused = [
        httpx2.post(f"{keyed.url}/sessions", json={"session_id": "mine", "metadata": {"a": 1}}, headers=bearer(key))
        for key in (OWN, OTHER)
    ]
    assert [answer.status_code for answer in refused] == [409, 409]
    assert refused[0].content == refused[1].content
    assert keyed.store.load_session("mine").info == before.info


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    guess=st.one_of(
        st.text(min_size=1, max_size=40),
        st.sampled_from(
            ["..", "../..", "../mine", "./mine", "mine/", "mine/.", "MINE", "mine\0", "%6dine", "mine?x", "mine;x", "*"]
        ),
    ),
    method=st.sampled_from(METHODS),
    raw=st.booleans(),
)
def test_session_ids_that_are_guessed(keyed: Gateway, guess: str, method: tuple[str, str], raw: bool) -> None:
    """Row 25: traversal, NUL, other spellings: never a session, never a file, never a 5xx."""
    verb, path = method
    encoded = guess if raw and guess.isascii() and guess.isprintable() and " " not in guess else quote(guess, safe="")
    where = urlsplit(keyed.url)
    head = f"{verb} /sessions/{encoded}{path} HTTP/1.1\r\nhost: {where.netloc}\r\nauthorization: Bearer {OTHER}\r\n"
    # A bare socket: clients tidy paths up.
    with socket.create_connection((where.hostname, where.port), timeout=PATIENCE) as connection:
        connection.sendall(f"{head}content-length: 11\r\nconnection: close\r\n\r\n".encode() + b'{"value":1}')
        answer = connection.makefile("rb").read()
    status = int(answer.split(b" ")[1])
    listing = verb == "GET" and status == 200 and b'"data":[]' in answer
    assert status in (400, 404, 405, 307) or listing, answer
    assert len(keyed.store.load_session("mine").turns) == 1


@contextmanager
def listener() -> Iterator[tuple[str, list[str]]]:
    """A server that should never be called, and who called it."""
    hits: list[str] = []
    with socket.create_server(("127.0.0.2", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, address = server.accept()
                except OSError:
                    return
                hits.append(str(address))
                connection.close()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.2:{server.getsockname()[1]}", hits
        server.shutdown(socket.SHUT_RDWR)


def test_addresses_in_requests_are_not_called(gateway: Gateway, upstream: Upstream) -> None:
    """Row 26: media is not fetched, no field names an engine, redirects of the engine are not followed."""
    with listener() as (url, hits):
        image = {"type": "image_url", "image_url": {"url": f"{url}/x.png"}}
        for body in (
            {"messages": [{"role": "user", "content": [image]}]},
            {"messages": [QUESTION], "base_url": url},
            {"messages": [QUESTION], "api_base": url},
            {"messages": [QUESTION], "model": url},
            {"messages": [QUESTION], "tools": [{"type": "mcp", "server_url": url}]},
        ):
            answer = httpx2.post(f"{gateway.url}/v1/chat/completions", json=body)
            assert answer.status_code == (200 if "model" in body else 400), body
        upstream.plans = [Plan(status=status, pieces=[b""], headers=f"location: {url}/\r\n") for status in (307, 302)]
        for stream in (True, False):
            error = gateway.refused(stream=stream)
            assert isinstance(error, openai.APIStatusError)
            assert error.status_code == 502
            assert error.response.headers["x-should-retry"] == "false"
        for header in ("host", "x-forwarded-host", "forwarded"):
            httpx2.get(f"{gateway.url}/v1/models", headers={header: urlsplit(url).netloc})
        assert hits == []
    # The one with an address for a model's name was answered.
    assert "s" not in gateway.check(unacknowledged=1)


@pytest.mark.parametrize(("method", "path"), [("POST", "/sessions/s/v1/chat/completions"), ("DELETE", "/sessions/s")])
def test_page_of_another_origin(gateway: Gateway, method: str, path: str) -> None:
    """Row 29: DNS rebinding shows in Host, a call across sites in Origin; neither reaches a session."""
    gateway.ask()
    for headers in (
        {"host": "evil.example"},
        {"host": "evil.example:80"},
        {"host": "127.0.0.1.evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
    ):
        answer = httpx2.request(method, gateway.url + path, json={"messages": [QUESTION]}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden"), headers
    assert len(gateway.check()["s"].turns) == 1


MARKER = "LEAKMARKER"


def test_no_caller_text_in_logs_and_errors(
    serve: Serve, upstream: Upstream, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Row 27: at DEBUG, through every way of failing, tracebacks included. Keys neither."""
    caplog.set_level(logging.DEBUG)
    key = f"{MARKER}-key-0123456789"
    gateway = serve(keys=Keys({"own": key}))
    secret = {"role": "user", "content": MARKER}
    tool = {"type": "function", "function": {"name": "f", "description": MARKER, "parameters": {"title": MARKER}}}
    good: dict[str, Any] = {"messages": [secret], "tools": [tool]}
    bodies: list[Any] = [
        good,
        {**good, "stream": True},
        {**good, "messages": [{"role": MARKER, "content": MARKER}]},
        {**good, "messages": [{"role": "user", "content": {"a": MARKER}}]},
        {**good, "messages": [{"role": "user", "content": [{"type": MARKER, "text": MARKER}]}]},
        {**good, "messages": [{"role": "assistant", "content": MARKER}]},
        {**good, "messages": [{"role": "tool", "content": MARKER, "tool_call_id": MARKER}]},
        {**good, "temperature": MARKER},
        {**good, "tool_choice": MARKER},
        {**good, "response_format": {"type": MARKER}},
        {**good, "chat_template_kwargs": {"enable_thinking": MARKER}},
        {**good, "stop": [MARKER] * 1000},
        f'{{"messages": "{MARKER}'.encode(),
        f'{{"messages": [{{"role": "user", "content": "{MARKER}\\ud800"}}]}}'.encode(),
        MARKER.encode() + b"\xff",
    ]
    plans = [
        Plan(events=3, then="reset"),
        Plan(pieces=[f'data: {{"error": {{"message": "{MARKER}", "code": 400}}}}\n\n'.encode()]),
        Plan(status=400, pieces=[f'{{"error": {{"message": "{MARKER}", "type": "{MARKER} x"}}}}'.encode()]),
        Plan(status=500, pieces=[MARKER.encode()]),
        Plan(pieces=[f"data: {MARKER}\n\n".encode()]),
        Plan(pieces=[MARKER.encode()]),
        Plan(text=f"{MARKER}<tool_call>\n{{{MARKER}"),
    ]
    answers = []
    for number, (body, plan) in enumerate(
        [*((value, Plan()) for value in bodies), *((good, value) for value in plans)]
    ):
        for stream in (False, True):
            upstream.plans = [plan]
            content = body if isinstance(body, bytes) else json.dumps({**body, "stream": stream}).encode()
            answer = httpx2.post(
                f"{gateway.url}/sessions/s{number}/v1/chat/completions", content=content, headers=bearer(key)
            )
            answers.append((answer.status_code, str(answer.headers), answer.text))
    for path in ("/v1/models", "/sessions", "/sessions/none", "/nowhere"):
        for headers in (bearer(key), bearer(f"{MARKER}-wrong-key-00"), {}):
            answer = httpx2.get(gateway.url + path, headers=headers)
            answers.append((400 if path == "/sessions" else answer.status_code, str(answer.headers), answer.text))
    with_errors = [entry for entry in answers if entry[0] >= 400 or '"error"' in entry[2]]
    assert len(with_errors) > 30
    leaked = [entry for entry in with_errors if MARKER in entry[1] or MARKER in entry[2]]
    assert not leaked
    gateway.stop()
    out, err = capfd.readouterr()
    written = [record for record in caplog.text.splitlines() if MARKER in record]
    assert not written
    assert MARKER not in out + err


@pytest.mark.slow
def test_no_caller_text_in_logs_and_metrics_of_a_process(model_dir: Path, upstream: Upstream, tmp_path: Path) -> None:
    """Row 27: the same of `tokentape serve --log-level debug`, its stderr and its /metrics."""
    keys = tmp_path / "keys"
    keys.write_text(f"own={MARKER}-key-0123456789\n")
    command = [*serve_command(model_dir, upstream, tmp_path / "data"), "--admin-keys-file", str(keys)]
    with serving([*command, "--log-level", "debug"]) as served:
        upstream.plans = [Plan(), Plan(events=3, then="reset"), Plan(status=500, pieces=[MARKER.encode()])]
        headers = bearer(f"{MARKER}-key-0123456789")
        for body in (
            *({"messages": [{"role": "user", "content": MARKER}], "stream": stream} for stream in (False, True, False)),
            {"messages": MARKER},
            {"messages": [{"role": "user", "content": MARKER}], "temperature": MARKER},
        ):
            httpx2.post(f"{served.url}/v1/chat/completions?q={MARKER}", json=body, headers=headers, timeout=PATIENCE)
        httpx2.get(f"{served.url}/{MARKER}", headers=bearer(f"{MARKER}-wrong-0123456789"))
        metrics = httpx2.get(f"{served.url}/metrics", headers=headers)
        assert metrics.status_code == 200
        assert MARKER not in metrics.text
        served.signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE) == 0
    assert len(served.lines) > 5
    assert not [line for line in served.lines if MARKER in line]


@pytest.mark.parametrize("name", [".", ".."])
def test_session_names_that_url_normalization_removes(gateway: Gateway, upstream: Upstream, name: str) -> None:
    """Row 25: clients and proxies make another path of these, and with it another session."""
    body = {"messages": [QUESTION]}
    for path, sent in [
        ("/sessions", {"session_id": name}),
        (f"/sessions/{quote(name, safe='').replace('.', '%2E')}/v1/chat/completions", body),
    ]:
        answer = httpx2.post(gateway.url + path, json=sent)
        assert answer.status_code in (400, 404), path
    assert not upstream.bodies
    assert gateway.check() == {}
