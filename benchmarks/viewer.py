"""Measure the viewer in a browser, for a long trajectory and for a list of many sessions.

    python benchmarks/viewer.py [--tokens 200000] [--turns 500] [--listed 10000] [--sessions 100000] [--chromium PATH]

Writes a session with this many tokens and turns of prose in the tiny model's tokens, encoded 300 letters at a time, so
that there is drift at most seams; every third token is sampled. Writes a sibling of it with the same first half, in
which the end of every later completion is other text, and a session of as many turns in two such branches. Serves them
as `tokentape view` does, and opens them in Chromium without a graphics card, in a window of 1440 x 900. Reports the
server's seconds and bytes per reply, and for the page: the time to the first tokens, to the marks of drift and to the
comparisons, the frame times while scrolling by screens and in jumps, and heap and nodes before and after. Times of the
page are also given in loads of a blank page, the median of several before and after: that ratio depends less on what
else the machine does.

Then opens a list of `--listed` small sessions of three turns and filters it, and times pages of a list of `--sessions`
by sort order and search, on the server. Needs playwright and Chromium; see `make test-browser`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import pydoc_data.topics
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from playwright.sync_api import CDPSession, Page, sync_playwright
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from tokentape._session.chain import seal
from tokentape.chat._renderer import Renderer
from tokentape.demo import MODEL
from tokentape.gateway._serve import running
from tokentape.store import SqliteStore
from tokentape.store import _schema as schema
from tokentape.store._listing import Listing
from tokentape.store._served_model import ServedModel, write_served_model
from tokentape.store._sqlite import DATABASE_NAME
from tokentape.types import Provenance, SessionInfo, Setup, Turn
from tokentape.viewer._app import create_app, store_viewer
from tokentape.viewer._source import StoreSource

TEXT = "\n".join(pydoc_data.topics.topics.values())
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]

SCROLL = """async (step) => {
  const pane = document.querySelector(".pane");
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const times = [];
  pane.scrollTop = 0;
  await frame();
  let last = performance.now();
  for (let n = 0; n < 60 && pane.scrollTop + pane.clientHeight < pane.scrollHeight - 1; n++) {
    pane.scrollTop += step || pane.scrollHeight / 60;
    await frame();
    const now = performance.now();
    times.push(now - last);
    last = now;
  }
  return times;
}"""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tokens", type=int, default=200_000)
    arguments.add_argument("--turns", type=int, default=500)
    arguments.add_argument("--listed", type=int, default=10_000)
    arguments.add_argument("--sessions", type=int, default=100_000)
    arguments.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        long, listed = Path(folder) / "long", Path(folder) / "listed"
        write_long(long, chosen.tokens, chosen.turns)
        write_many(listed, chosen.listed)
        with served(long) as url, served(listed) as list_url, running(Starlette(routes=[BLANK])) as blank_url:
            time_server(url, chosen.turns)
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=chosen.chromium, args=ARGUMENTS)
                page = browser.new_page(viewport={"width": 1440, "height": 900})
                print(f"page, Chromium {browser.version}")
                clock = Clock(page, blank_url)
                time_page(page, url, chosen.turns, clock)
                time_shown_list(page, list_url, chosen.listed, clock)
                clock.report()
                browser.close()
        if chosen.sessions:
            time_list(Path(folder) / "many", chosen.sessions)


async def blank(request: Request) -> HTMLResponse:
    """Return a page without anything."""
    return HTMLResponse("<!doctype html><title>blank</title>", headers={"cache-control": "no-store"})


BLANK = Route("/", blank)


class Clock:
    """Times of a page, and how many loads of a blank page they are."""

    def __init__(self, page: Page, blank_url: str) -> None:
        self._page, self._url = page, blank_url
        self._times: dict[str, float] = {}
        self._blanks: list[float] = []
        self._load_blanks()

    def _load_blanks(self) -> None:
        for _ in range(10):
            start = time.perf_counter()
            self._page.goto(self._url)
            self._blanks.append(time.perf_counter() - start)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time what is done meanwhile."""
        start = time.perf_counter()
        yield
        self._times[name] = time.perf_counter() - start

    def report(self) -> None:
        """Print all times in seconds and in loads of a blank page."""
        self._load_blanks()
        one = statistics.median(self._blanks)
        print(f"times, and in loads of a blank page ({one:.3f} s)")
        for name, seconds in self._times.items():
            print(f"  {name:28} {seconds:.2f} s   {seconds / one:.0f}")


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve a data directory as `tokentape view` does."""
    with (
        SqliteStore.open(directory, read_only=True) as store,
        running(create_app(store_viewer(store, str(directory)))) as url,
    ):
        yield url


def write_long(directory: Path, tokens: int, turns: int) -> None:
    """Write a session of `tokens` tokens, its sibling, and a session with two branches."""
    renderer = Renderer.load(MODEL)
    pieces = (TEXT[at : at + 300] for at in range(0, len(TEXT), 300))
    ids = [one for piece in pieces for one in renderer.tokenizer.encode_marked(piece).ids]
    ids = np.resize(np.array(ids, np.int32), tokens)
    begin, end = (renderer.tokenizer.encode_plain(text)[0] for text in ("<|im_start|>", "<|im_end|>"))
    sibling = ids.copy()
    for own, other in zip(np.array_split(ids, turns), np.array_split(sibling, turns), strict=True):
        other[-len(own) // 10 :] = other[: -(-len(own) // 10)]
        own[0], own[-1] = other[0], other[-1] = begin, end
    sibling[: tokens // 2] = ids[: tokens // 2]
    with SqliteStore.open(directory) as store:
        setup = a_setup()
        for name, own in (("long", ids), ("sibling", sibling)):
            asyncio.run(store.write(SessionInfo(name, time.time()), setup, *turns_of(name, setup, own, turns)))
        half, third = tokens // 2, turns // 3
        one = list(turns_of("branches", setup, ids[half:], turns - third))
        # The other branch begins after the first turn, which both have.
        other = turns_of(
            "branches", setup, sibling[half:][len(one[0].added_ids) + len(one[0].completion_ids) :], third, one
        )
        asyncio.run(store.write(SessionInfo("branches", time.time()), setup, *one, *other))
    write_served_model(directory, ServedModel(str(MODEL), renderer.tokenizer.sha256, renderer.fingerprint))


def a_setup() -> Setup:
    return Setup((), {}, "2026-01-01", "f")


def turns_of(session_id: str, setup: Setup, ids: Any, turns: int, beside: Sequence[Turn] = ()) -> Iterator[Turn]:
    """Return `ids` as turns with two thirds added and the rest sampled: a fork after the first turn of `beside`."""
    rng = np.random.default_rng(0)
    before = beside[0] if beside else None
    for seq, own in enumerate(np.array_split(ids, turns), len(beside)):
        cut = 2 * len(own) // 3
        turn = Turn(
            session_id=session_id,
            seq=seq,
            parent=None if before is None else before.seq,
            setup=setup.digest,
            messages=({"role": "user", "content": f"question {seq}"},),
            reply={"role": "assistant", "content": f"answer {seq}"},
            added_ids=own[:cut],
            added_provenance=np.full(cut, Provenance.TOOL, np.uint8),
            completion_ids=own[cut:],
            logprobs=-rng.exponential(0.6, len(own) - cut).astype(np.float32),
            finish_reason="stop",
            stop=7,
            fork="branched" if beside and seq == len(beside) else None,
            sampling={},
            engine="none 1 raw_logprobs",
            weight_version=f"step-{seq // 10}",
            created_at=time.time(),
            digest="",
        )
        before = seal(dataclasses.replace(turn), None if before is None else before.digest)
        yield before


def time_server(url: str, turns: int) -> None:
    print("server, seconds (first time, again) and bytes")
    with httpx2.Client(base_url=f"{url}/view/api/", timeout=120) as http:
        for name, path in (
            ("tree", "sessions/long"),
            ("arrays", f"sessions/long/leaves/{turns - 1}"),
            ("what is new of them", f"sessions/long/leaves/{turns - 1}?from=199000"),
            ("retokenized", f"sessions/long/leaves/{turns - 1}/comparison"),
        ):
            seconds = []
            for _ in range(2):
                start = time.perf_counter()
                answer = http.get(path)
                seconds.append(time.perf_counter() - start)
            print(f"  {name:20} {seconds[0]:.3f} {seconds[1]:.3f}  {len(answer.content):>10,}")
        etag = {"if-none-match": http.get("sessions/long").headers["etag"]}
        start = time.perf_counter()
        for _ in range(100):
            assert http.get("sessions/long", headers=etag).status_code == 304
        print(f"  a poll without news  {(time.perf_counter() - start) / 100:.4f}")


def time_page(page: Page, url: str, turns: int, clock: Clock) -> None:
    session = page.context.new_cdp_session(page)
    page.goto(f"{url}/view#/sessions")
    page.wait_for_selector("tbody tr")
    print(f"  list                  {memory(session)}")
    page.goto("about:blank")
    with clock.timed("drift marked"):
        with clock.timed("first tokens"):
            page.goto(f"{url}/view#/session/long/view/tokens")
            page.wait_for_selector(".row [data-i]", timeout=120_000)
        page.wait_for_selector(".driftcount, .tools .dim", timeout=120_000)
    print(f"  before scrolling      {memory(session)}")
    for name, step in (("a screen at a time", 800), ("in 60 leaps", 0)):
        times = np.array(page.evaluate(SCROLL, step))
        middle, slow = np.percentile(times, [50, 95])
        print(
            f"  scrolled {name:20} {len(times)} frames: {middle:.0f} ms, 95 % within {slow:.0f}, "
            f"{times.max():.0f} at most"
        )
    page.wait_for_timeout(1000)
    print(f"  after scrolling       {memory(session)}")
    with clock.timed("to the last token, by a key"):
        page.keyboard.press("End")
        page.wait_for_selector(".row .at")
    for name, address in (
        ("comparison", "long/view/beside"),
        ("two branches", "branches/leaf/{leaf}/with/leaf-{turn}/view/beside"),
        ("two sessions", "long?compare=sibling"),
    ):
        page.goto("about:blank")
        last = turns - 1
        with clock.timed(name):
            page.goto(f"{url}/view#/session/{address.format(leaf=last - turns // 3, turn=last)}")
            page.wait_for_selector(".sides:not(.head)", timeout=120_000)
        print(f"  {name:21} {page.locator('.summary').inner_text().splitlines()[0]}")
        most = 0
        for key in ("n", "n", "p", "p"):
            page.keyboard.press(key)
            page.wait_for_timeout(1000)
            most = max(most, page.evaluate("document.evaluate('//node()', document, null, 7, null).snapshotLength"))
        print(f"  {name:21} {memory(session)}; {most:,} of the page at most while going to differences")
    session.detach()


def time_shown_list(page: Page, url: str, sessions: int, clock: Clock) -> None:
    page.goto("about:blank")
    with clock.timed(f"list of {sessions:,} sessions"):
        page.goto(f"{url}/view#/sessions")
        page.wait_for_selector("tbody tr")
    with clock.timed("list filtered to one session"):
        page.locator("#search").fill(f"session-{sessions // 2:06}")
        page.wait_for_selector("tbody tr:only-child")
    page.locator("#search").fill("")
    page.wait_for_selector("tbody tr:nth-child(2)")
    with clock.timed("list filtered by metadata"):
        page.locator("#metadata").fill("task=7")
        page.keyboard.press("Enter")
        page.wait_for_selector(".chip")
        page.wait_for_selector("tbody tr")


def memory(session: CDPSession) -> str:
    """Return the JavaScript heap after a garbage collection, and the number of elements and text nodes."""
    # What the first collection frees may have kept nodes.
    for _ in range(2):
        session.send("HeapProfiler.collectGarbage")
    used = session.send("Runtime.getHeapUsage")["usedSize"]
    nodes = session.send("Memory.getDOMCounters")["nodes"]
    return f"{used / 1e6:.0f} MB of heap, {nodes:,} nodes"


def write_many(directory: Path, sessions: int) -> None:
    """Write one session of three turns, and copies of its rows under other ids by SQL; a list reads no hash chains."""
    setup = a_setup()
    with SqliteStore.open(directory) as store:
        turns = turns_of("session-000000", setup, np.arange(600, dtype=np.int32), turns=3)
        asyncio.run(store.write(SessionInfo("session-000000", 0.0, {"task": 0}), setup, *turns))
    with closing(sqlite3.connect(directory / DATABASE_NAME)) as database, database:
        numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {sessions - 1}) "
        name = "printf('session-%06d', i)"
        database.execute(
            "INSERT INTO sessions (session_id, created_at, metadata, owner) "
            f"{numbers} SELECT {name}, i, json_object('task', i % 50), '' FROM n"
        )
        kept = [column.name for column in schema.turns.columns if column.name != "session_id"]
        names = ", ".join(kept)
        database.execute(
            f"INSERT INTO turns (session_id, {names}) {numbers} SELECT {name}, {names} FROM n, turns "
            "WHERE session_id = 'session-000000'"
        )
        database.execute(
            "INSERT INTO rewards (session_id, value, created_at, scope) "
            f"{numbers} SELECT {name}, abs(random() % 100) / 100.0, 0, 'session' FROM n"
        )
    database.close()


def time_list(directory: Path, sessions: int) -> None:
    write_many(directory, sessions)
    with SqliteStore.open(directory, read_only=True) as store:
        print(f"a page of the list of {sessions:,} sessions of three turns, seconds")
        source = StoreSource(store, "many")
        last = max(0, sessions - 100)
        for name, wanted in (
            ("newest", Listing()),
            ("oldest", Listing(descending=False)),
            ("last page", Listing(offset=last)),
            ("searched: one", Listing(search=f"session-{sessions // 2:06}")),
            ("searched in metadata", Listing(search='"task":7}')),
            ("with a fork", Listing(fork="any")),
            ("most turns", Listing(sort="turns")),
            ("most tokens", Listing(sort="tokens")),
            ("most reward", Listing(sort="reward")),
            ("most forks", Listing(sort="forks")),
        ):
            start = time.perf_counter()
            page = source.page(wanted)
            print(f"  {name:22} {time.perf_counter() - start:.3f}  ({page.total:,} found)")


if __name__ == "__main__":
    main()
