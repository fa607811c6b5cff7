"""A file of a session or a run: it shows the same as the server, without a server, and runs nothing else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx2
import numpy as np
import pytest

from tests.records import SETUP, make_turn
from tests.viewer.conftest import HOSTILE
from tests.viewer.runs import SESSIONS, corrupt, record_run
from tokentape.chat._renderer import Renderer
from tokentape.errors import NotFound, StoreCorrupt
from tokentape.gateway._serve import running
from tokentape.store import SqliteStore
from tokentape.types import RecordedReply, SessionInfo
from tokentape.viewer._app import create_app, key_visit
from tokentape.viewer._comparing import RETOKENIZED, RecordReader
from tokentape.viewer._export import export_page
from tokentape.viewer._routes import Viewer
from tokentape.viewer._source import SessionView, StoreSource

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAME = "<script>window.hurt=1<!--"


@pytest.fixture(scope="module")
def viewer(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    """Fill a store with a run, and a session with hostile name, metadata and texts."""
    with SqliteStore.open(tmp_path_factory.mktemp("exported")) as store:
        asyncio.run(record_run(store, renderer))
        ids = np.array(renderer.tokenizer.encode_marked(HOSTILE).ids, np.int32)
        turn = make_turn(NAME, 0, completion_ids=ids, logprobs=np.zeros(len(ids), np.float32), weight_version=NAME)
        tops = (tuple(((token, -0.5),) for token in ids.tolist()),)
        answer = RecordedReply(NAME, "r", (0,), None, "d1", 1.0, tops)
        asyncio.run(store.write(SessionInfo(NAME, 1e6, {"task": HOSTILE}), turn, answer))
        yield Viewer(StoreSource(store, "run"), RecordReader(renderer.tokenizer))


@pytest.fixture(scope="module")
def site(viewer: Viewer) -> Iterator[str]:
    with running(create_app(viewer)) as url:
        yield url


def answers(html: bytes) -> dict[str, bytes]:
    match = re.search(rb'<script type="application/json" id="answers">(.*?)</script>', html, re.DOTALL)
    assert match is not None
    return {path: zlib.decompress(base64.b64decode(text)) for path, text in json.loads(match[1]).items()}


def parts_of(view: SessionView, sides: list[str]) -> Iterator[str]:
    """Yield the paths of all requests of the page for a session."""
    path = f"sessions/{quote(view.info.session_id, safe='()*!~')}"
    yield path
    for trajectory in view.trajectories:
        yield f"{path}/leaves/{trajectory.leaf}"
        yield from (f"{path}/leaves/{trajectory.leaf}/comparison?{side}" for side in sides)
    stored = view.stored
    assert stored is not None
    for answer in stored.answers:
        if answer.top_logprobs:
            yield from (f"{path}/turns/{turn}/alternatives" for turn in answer.turns)


def test_exported_run_has_the_responses_of_the_server(viewer: Viewer, site: str) -> None:
    made = export_page(viewer)
    assert (made.whole, made.listed, made.total) == (SESSIONS + 1,) * 3
    bodies = answers(made.html)
    with httpx2.Client(base_url=f"{site}/view/api/") as http:
        ids = ",".join(session["session_id"] for session in http.get("sessions").json()["sessions"])
        http.get("measures", params={"ids": ids})
        for path, body in bodies.items():
            query = {"comparison": "?with=", "run": "?group="}.get(path.split("?")[0].rsplit("/", 1)[-1], "?")
            served = http.get(path.replace("?", query))
            if path == "about":
                assert json.loads(body) == served.json() | {"exported": True, "grows": False}
            elif path.startswith("run") or path == "sessions":
                answer: Any = json.loads(body)
                assert answer == {name: value for name, value in served.json().items() if name in answer}
            else:
                assert body == served.content
    parts = {path for path in bodies if "/" in path}
    assert parts == {path for view in map(viewer.source.load, ids.split(",")) for path in parts_of(view, [RETOKENIZED])}
    assert any(path.endswith("/alternatives") for path in parts)


def test_exported_session_is_complete_at_any_size(viewer: Viewer) -> None:
    made = export_page(viewer, "s01", max_bytes=1)
    assert made.whole == 1
    bodies = answers(made.html)
    assert json.loads(bodies["about"])["only_session"] == "s01"
    assert [session["session_id"] for session in json.loads(bodies["sessions"])["sessions"]] == ["s01"]
    assert {path for path in bodies if "/" in path} == {*parts_of(viewer.source.load("s01"), [RETOKENIZED])}
    with pytest.raises(NotFound):
        export_page(viewer, "nothing")


def test_sessions_over_the_size_limit_are_listed_without_tokens(viewer: Viewer) -> None:
    made = export_page(viewer, max_bytes=20_000)
    bodies = answers(made.html)
    assert 0 < made.whole < made.listed == len(json.loads(bodies["sessions"])["sessions"])
    whole = {path.split("/")[1] for path in bodies if path.count("/") == 1}
    assert len(whole) == made.whole
    assert {path.split("/")[1] for path in bodies if "/" in path} == whole


def test_policy_allows_only_the_file_s_script_and_style(viewer: Viewer) -> None:
    html = export_page(viewer).html.decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', html)
    scripts = re.findall(r'<script type="module">(.*?)</script>', html, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert policy is not None
    assert len(scripts) == 1
    for text, name in ((scripts[0], "script-src"), (style, "style-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert len(re.findall(r"<script\b", html)) == 2
    assert not re.findall(r"<(?:link|img|iframe)\b", html)
    assert NAME not in html


def test_encrypted_file_shows_nothing_without_its_key(viewer: Viewer) -> None:
    with running(create_app(replace(viewer, visit=key_visit("a-key")))) as url, httpx2.Client(base_url=url) as http:
        assert http.get("/view").status_code == 200
        for key, status in (("", 401), ("another", 401), ("a-key", 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert http.get("/view/api/sessions", headers=headers).status_code == status


def test_an_unreadable_session_is_left_out_of_lists_and_files(store: SqliteStore, tmp_path: Path) -> None:
    turns = [make_turn(name, 0) for name in ("good", "bad")]
    asyncio.run(store.write(SETUP, *(SessionInfo(turn.session_id, 1.0) for turn in turns), *turns))
    corrupt(tmp_path / "data", "bad")
    viewer = Viewer(StoreSource(store, "run"), RecordReader())
    made = export_page(viewer)
    assert (made.listed, made.whole, made.unreadable) == (2, 1, 1)
    with running(create_app(viewer)) as url, httpx2.Client(base_url=f"{url}/view/api/") as http:
        measured = http.get("measures?ids=good,bad").json()
        assert (list(measured["measures"]), list(measured["unreadable"])) == (["good"], ["bad"])
        listed = {session["session_id"]: session for session in http.get("sessions").json()["sessions"]}
        assert ("unreadable" in listed["bad"], "unreadable" in listed["good"]) == (True, False)
        response = http.get("sessions?verdict=exact").json()
        assert (response["total"], response["measured"], response["of"], response["unreadable"]) == (1, 2, 2, 1)
        assert http.get("run").json()["unreadable"] == 1
    with pytest.raises(StoreCorrupt):
        export_page(viewer, "bad")


def test_offered_keys_are_those_of_the_file_including_the_group_key(store: SqliteStore) -> None:
    turns = [make_turn(f"s{n}", 0) for n in range(3)]
    infos = [
        SessionInfo(turn.session_id, 1.0, {"task": n} | {f"key{k}": 0 for k in range(9)})
        for n, turn in enumerate(turns)
    ]
    asyncio.run(store.write(SETUP, *infos, *turns))
    bodies = answers(export_page(Viewer(StoreSource(store, "run"), RecordReader())).html)
    offered = json.loads(bodies["run"])["keys"]
    assert "task" in offered
    assert {f"run?{key}" for key in offered} == {path for path in bodies if path.startswith("run?")}


def test_lone_surrogate_in_metadata_is_sent(store: SqliteStore) -> None:
    half = {"task": "\ud800", "\ud800": "1"}
    asyncio.run(store.write(SETUP, SessionInfo("s", 1.0, half), make_turn("s", 0)))
    viewer = Viewer(StoreSource(store, "run"), RecordReader())
    assert json.loads(answers(export_page(viewer).html)["sessions"])["sessions"][0]["metadata"] == half
    with running(create_app(viewer)) as url, httpx2.Client(base_url=f"{url}/view/api/") as http:
        assert json.loads(http.get("sessions").content)["sessions"][0]["metadata"] == half
        assert json.loads(http.get("run").content)["groups"][0]["value"] == "\ud800"


def test_a_group_is_listed_exactly(store: SqliteStore) -> None:
    values = ["a", "A", "a\nb=c", "", {"task": "a"}, 1]
    turns = [make_turn(f"s{n}", 0) for n in range(len(values) + 2)]
    metadata: list[dict[str, Any]] = [*({"task": value} for value in values), {"task": "a"}, {"deep": {"task": "a"}}]
    infos = [SessionInfo(turn.session_id, 1.0, of) for turn, of in zip(turns, metadata, strict=True)]
    asyncio.run(store.write(SETUP, *infos, *turns))
    app = create_app(Viewer(StoreSource(store, "run"), RecordReader()))
    with running(app) as url, httpx2.Client(base_url=f"{url}/view/api/") as http:
        groups = http.get("run?group=task").json()["groups"]
        assert len(groups) == len(values)
        for group in groups:
            query = {"group_key": "task", "group_value": group["value"]}
            listed = http.get("sessions", params=query).json()
            assert (listed["total"], len(listed["sessions"])) == (group["sessions"], group["sessions"])
            assert [again["value"] for again in http.get("run", params=query).json()["groups"]] == [group["value"]]
        listed = http.get("sessions", params={"group_key": "task", "group_value": "a"}).json()["sessions"]
        assert {session["session_id"] for session in listed} == {"s0", "s6"}


@pytest.mark.browser
def test_exported_file_is_readable_without_a_server(browser: Browser, viewer: Viewer, tmp_path: Path) -> None:
    for name, page in {"run": export_page(viewer), "one": export_page(viewer, NAME)}.items():
        # In Firefox, Playwright evaluates text, which the file's policy forbids.
        allowed = b"script-src 'unsafe-eval' " if browser.browser_type.name == "firefox" else b"script-src "
        (tmp_path / f"{name}.html").write_bytes(page.html.replace(b"script-src ", allowed, 1))
    with browser.new_context(viewport={"width": 1200, "height": 800}) as context:
        page, problems = context.new_page(), list[str]()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda request: problems.extend([request.url] if request.url[:5] != "file:" else []))
        page.goto(f"file://{tmp_path}/one.html")
        page.wait_for_selector(".row [data-i]")
        page.get_by_role("button", name="Recorded vs. ").click()
        page.wait_for_selector(".sides")
        assert page.title() == f"{NAME} · Tokentape"
        page.goto(f"file://{tmp_path}/run.html#/run?group=nothing&search=nothing")
        page.wait_for_selector(".chart")
        assert page.get_by_text("search nothing").count() == 0
        assert _count(page, ".groups tbody tr") == 5
        page.goto(f"file://{tmp_path}/run.html#/sessions?search=nothing&page=2")
        page.wait_for_selector("td.session a")
        assert _count(page, "td.session a") == SESSIONS + 1
        page.locator("td.session a").nth(1).click()
        page.wait_for_selector(".row [data-i]")
        page.keyboard.press("?")
        keys = page.get_by_role("dialog").inner_text()
        assert ("all sessions" in keys, "overview" in keys) == (True, False)
        page.goto(f"file://{tmp_path}/run.html#/session/old")
        page.get_by_text(f"only the tokens of the newest {SESSIONS + 1} sessions").wait_for()
        assert page.evaluate("window.hurt") is None
        assert problems == []


@pytest.mark.browser
def test_exported_file_shows_its_number_of_sessions(
    browser: Browser, viewer: Viewer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokentape.viewer._export.MAX_PAGE", 3)
    (tmp_path / "run.html").write_bytes(export_page(viewer).html)
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"file://{tmp_path}/run.html#/sessions")
        page.get_by_text(f"the newest 3 of {SESSIONS + 1} sessions; the other ones are not in this file").wait_for()


def _count(page: Page, selector: str) -> int:
    return page.locator(selector).count()
