"""The page of a run in a real browser: its figures, missing records, groups, links to sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.records import make_turn
from tests.viewer.conftest import until
from tests.viewer.runs import SESSIONS, record_run
from tests.viewer.test_browser_pages import fits, serious
from tokentape.chat._renderer import Renderer
from tokentape.gateway._serve import running
from tokentape.store import SqliteStore
from tokentape.types import Reward, SessionInfo
from tokentape.viewer._app import create_app
from tokentape.viewer._comparing import RecordReader
from tokentape.viewer._routes import Viewer
from tokentape.viewer._source import StoreSource

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=alert(1)>\u202e"


@pytest.fixture(scope="module")
def recorded(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteStore]:
    with SqliteStore.open(tmp_path_factory.mktemp("run")) as store:
        asyncio.run(record_run(store, renderer))
        yield store


@pytest.fixture(scope="module")
def site(recorded: SqliteStore, renderer: Renderer) -> Iterator[str]:
    """Serve the page of the run. The browser of this module starts after it."""
    viewer = Viewer(StoreSource(recorded, "run"), RecordReader(renderer.tokenizer, renderer))
    with running(create_app(viewer)) as url:
        yield url


def figures(page: Page) -> dict[str, str]:
    texts: dict[str, str] = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".chart")]
            .map((chart) => [chart.querySelector("h2").textContent, chart.querySelector(".figure").textContent]))"""
    )
    return texts


def opened(page: Page, site: str, query: str = "") -> None:
    page.goto(f"{site}/view#/run{query}")
    page.wait_for_selector(".chart")
    until(page, "!document.querySelector('.listhead').textContent.includes('still missing')")


def run_beside(work: Coroutine[Any, Any, None]) -> None:
    """Run it in another thread: the driver of the browser uses the event loop of this thread."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()


def run_answer(page: Page, site: str, query: str = "") -> dict[str, Any]:
    run: dict[str, Any] = page.request.get(f"{site}/view/api/run{query}").json()
    return run


def test_versions_are_reached_by_keys_and_link_to_their_sessions(
    page: Page, site: str, shot: Callable[[Page, str], None]
) -> None:
    opened(page, site)
    versions = run_answer(page, site)["weights"]
    for version in [versions[-1], *reversed(versions)]:
        shown = figures(page)
        assert shown["Reward"].endswith(f"at weights {version['weights']}")
        assert float(shown["Drift"].split()[0]) == pytest.approx(100 * version["drift"], rel=1e-3)
        assert float(shown["Sampled tokens per session"].split("at")[0]) == pytest.approx(version["length"], rel=1e-3)
        assert float(shown["Truncated turns"].split()[0]) == pytest.approx(100 * version["truncated"], rel=1e-3)
        forks = 100 * sum(version["forks"].values()) / version["turns"]
        assert float(shown["Forks per 100 turns"].split()[0]) == pytest.approx(forks, rel=1e-3)
        assert (
            f"weights {version['weights']} · {version['turns']} turns" in page.locator(".listhead").first.inner_text()
        )
        page.keyboard.press("ArrowLeft")
    shot(page, "run")
    page.keyboard.press("Enter")
    page.wait_for_selector("td.session a")
    assert f"weights={versions[0]['weights']}" in page.url


def test_groups_of_a_key_link_to_their_sessions(page: Page, site: str) -> None:
    opened(page, site)
    lines = page.locator(".groups tbody tr")
    groups = run_answer(page, site)["groups"]
    assert lines.count() == len(groups) == 4
    for line, group in zip(lines.all(), groups, strict=True):
        cells = line.locator("td").all_inner_texts()
        assert cells[0] == group["value"]
        assert cells[3] == ("not recorded" if group["sd"] is None else f"{group['sd']:.4g}")
        assert line.locator("circle").count() == len(group["rewards"])
    page.get_by_role("button", name="Spread").click()
    spreads = [float(text) for text in page.locator(".groups tbody td:nth-child(4)").all_inner_texts()]
    assert spreads == sorted(spreads)
    page.locator(".groups tbody a").first.click()
    page.wait_for_selector("td.session a")
    assert page.locator("td.session a").count() == SESSIONS // 4


def test_the_best_session_of_a_group_is_compared_with_the_worst(page: Page, site: str) -> None:
    page.set_viewport_size({"width": 420, "height": 900})
    opened(page, site)
    for table in page.locator(".run table").all():
        heads, cells = table.locator("thead tr > *:visible"), table.locator("tbody tr").first.locator("td:visible")
        assert heads.count() == cells.count()
    groups = run_answer(page, site)["groups"]
    some = next(n for n, group in enumerate(groups) if group["best_and_worst"] and group["least"] < group["most"])
    page.locator(".groups tbody tr").nth(some).get_by_role("link", name="best ⇄ worst").click()
    page.wait_for_selector(".sides.head h3")
    assert page.locator(".sides.head bdi").all_text_contents() == groups[some]["best_and_worst"]


def test_groups_with_equal_rewards_are_counted_and_shown_alone(page: Page, site: str) -> None:
    opened(page, site)
    groups = run_answer(page, site)["groups"]
    (equal,) = (group["value"] for group in groups if len(group["rewards"]) > 1 and len(set(group["rewards"])) == 1)
    button = page.get_by_role("button", name="1 group with equal rewards (no advantage)")
    button.click()
    assert page.locator(".groups tbody td.key").all_inner_texts() == [equal]
    button.click()
    assert page.locator(".groups tbody tr").count() == len(groups)


def test_run_page_shows_what_is_not_measured_yet(page: Page, site: str) -> None:
    answer = run_answer(page, site) | {"measured": 5, "of": SESSIONS}
    page.route("**/api/run", lambda route: route.fulfill(json=answer))
    page.route("**/api/run?*", lambda route: route.fulfill(json=answer))
    page.goto(f"{site}/view#/run")
    text = f"Measuring 5 of {SESSIONS} sessions, newest first; earlier weights are still missing"
    page.get_by_text(text).wait_for()


def test_the_best_versions_are_named(page: Page, site: str) -> None:
    opened(page, site)
    versions = run_answer(page, site)["weights"]
    most = max(version["mean"] for version in versions if version["mean"] is not None)
    (best,) = (version["weights"] for version in versions if version["mean"] == most)
    text = page.locator(".chart", has=page.get_by_role("heading", name="Reward")).inner_text()
    assert f"Best: {most:.4g} at weights {best}." in text


def test_missing_records_are_reported(page: Page, site: str) -> None:
    opened(page, site, "?search=s04")
    shown = figures(page)
    assert shown["Cache hits"] == "not recorded"
    assert shown["Importance ratio"] == "not recorded"


def test_huge_rewards_are_drawn(page: Page, site: str, recorded: SqliteStore) -> None:
    turns = [make_turn(f"huge-{n}", 0, weight_version="huge") for n in range(2)]
    infos = [SessionInfo(turn.session_id, 1e6, {"task": "huge"}) for turn in turns]
    rewards = [Reward(f"huge-{n}", None, value, 1e6) for n, value in enumerate((-1e308, 1e308))]
    run_beside(recorded.write(*infos, *turns, *rewards))
    opened(page, site, "?search=huge")
    places = page.locator(".strip circle").evaluate_all("dots => dots.map((dot) => dot.cx.baseVal.value)")
    assert sorted(places) == [4, 100]
    for turn in turns:
        run_beside(recorded.delete_session(turn.session_id))


def test_run_page_updates_with_new_records(page: Page, site: str, recorded: SqliteStore, renderer: Renderer) -> None:
    opened(page, site, "?search=later")
    page.get_by_text("0 sessions").wait_for()
    turn = make_turn("later", 0, weight_version=HOSTILE, created_at=1e6)
    run_beside(recorded.write(SessionInfo("later", 1e6, {"task": HOSTILE}), turn))
    page.locator(".groups tbody tr").wait_for()
    assert page.locator(".groups tbody bdi").first.text_content() == HOSTILE
    assert page.locator("main img").count() == 0
    run_beside(recorded.delete_session("later"))


MEAN_OPACITY = """(([from, to]) => {
  const map = document.querySelector(".minimap");
  const copy = new OffscreenCanvas(map.width, map.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(map, 0, 0);
  const { data } = copy.getImageData(map.width - 3, from * map.height, 1, (to - from) * map.height);
  return data.reduce((sum, value, i) => sum + (i % 4 === 3 ? value : 0), 0) / (data.length / 4);
})"""


def test_the_map_of_a_long_session_shows_where_more_tokens_differ(
    page: Page, site: str, recorded: SqliteStore, renderer: Renderer
) -> None:
    encode, rng = renderer.tokenizer.encode_plain, np.random.default_rng(7)
    cut = rng.random(6000) < np.linspace(0.15, 0.95, 6000)
    ids = [i for split in cut for text in ((" pe", "ars") if split else (" pears",)) for i in encode(text)]
    logprobs = np.zeros(len(ids), np.float32)
    turn = make_turn("long", 0, completion_ids=np.array(ids, np.int32), logprobs=logprobs, created_at=1e6)
    run_beside(recorded.write(SessionInfo("long", 1e6), turn))
    page.goto(f"{site}/view#/session/long")
    page.wait_for_selector(".driftcount")
    first, last = (page.evaluate(f"{MEAN_OPACITY}({part})") for part in ([0, 1 / 3], [2 / 3, 1]))
    # Each line of the map has differences: if they are drawn as a single bar, both are 255.
    assert 100 < first < 0.8 * last
    run_beside(recorded.delete_session("long"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_run_page_passes_accessibility_checks(page: Page, site: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python, which has axe-core")
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    opened(page, site)
    page.locator(".figures summary").click()
    assert serious(page, axe) == []


def test_the_run_fits_at_each_width(page: Page, site: str, shot: Callable[[Page, str], None]) -> None:
    opened(page, site)
    fits(page, "run", shot)
