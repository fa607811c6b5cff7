"""The pages around the tokens in a real browser: lists, trees, live updates, overview, both kinds of keys, themes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from tests.viewer.conftest import ALICE, HOSTILE, OPS, Site, ask, new_context, reopened, until
from tokentape._session.arrow import write_parquet
from tokentape.gateway._serve import running
from tokentape.types import Trajectory
from tokentape.viewer._app import create_app, file_viewer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

Shot = Callable[["Page", str], None]

VIEWS = {
    "list": "/sessions",
    "session": "/session/shop/token/200",
    "beside": "/session/shop/with/rerendered/view/beside",
    "sessions": "/session/shop?compare=forked",
    "hostile": "/session/hostile",
    "overview": "/overview",
    "missing": "/session/nothing",
}


def names(page: Page) -> list[str]:
    return page.locator("td.session a").all_text_contents()


def open_list(page: Page, site: Site, query: str = "") -> None:
    page.goto(site.at(f"/sessions{query}"))
    page.wait_for_selector("tbody tr")


def test_newest_sessions_are_listed_a_page_at_a_time(page: Page, site: Site, shot: Shot) -> None:
    open_list(page, site)
    assert page.locator(".listhead p").inner_text().startswith("23")
    assert len(names(page)) == 100
    assert {"shop", "forked", "weights", "hostile"} <= set(names(page)[:8])
    until(page, "document.querySelectorAll('td.drift .badge, td.drift .dim').length > 90")
    shot(page, "list")
    page.get_by_role("button", name="next ›").click()
    until(page, "document.querySelector('.pager').textContent.includes('page 2 of 3')")
    assert len(names(page)) == 100
    page.keyboard.press("n")
    until(page, "document.querySelector('.pager').textContent.includes('page 3 of 3')")
    assert names(page)[-1] == "huge"


def test_sessions_are_sorted_by_their_columns(page: Page, site: Site) -> None:
    open_list(page, site)
    for head, first in (("Tokens", "huge"), ("Forks", "forked"), ("Aborted", "forked"), ("Reward", "shop")):
        page.get_by_role("button", name=head).click()
        until(page, f"document.querySelector('td.session a').textContent === '{first}'")
        until(page, f"document.querySelector('th[aria-sort=descending]').textContent.startsWith('{head}')")
    page.get_by_role("button", name="Session", exact=True).click()
    until(page, "document.querySelector('td.session a').textContent === 'forked'")
    assert "sort=session" in page.url


def test_list_measures_and_sorts_by_drift(page: Page, site: Site) -> None:
    open_list(page, site, "?search=sho")
    cell = page.locator("tr[data-id=shop] td.drift .badge")
    cell.wait_for()
    assert re.fullmatch(r"≠ \d+ tokens?", cell.inner_text())
    assert cell.get_attribute("title")
    page.locator("#search").fill("")
    page.get_by_role("button", name="Drift", exact=True).click()
    until(page, "document.querySelector('.listhead').textContent.includes('newest')")
    changed = page.locator("td.drift").all_inner_texts()
    counts = [int(re.findall(r"\d+", text)[0]) if "≠" in text else 0 for text in changed]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 0
    drifted = sum(count > 0 for count in counts)
    page.locator("#drift").select_option(index=1)
    until(page, f"document.querySelectorAll('td.session a').length === {drifted}")
    assert page.locator("td.drift .badge").count() == drifted
    page.locator("#drift").select_option(index=2)
    until(page, "document.querySelectorAll('td.drift .badge').length === 0")
    assert names(page)


def test_drift_of_a_growing_session_is_never_outdated(page: Page, site: Site) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello, I am Olga."}]
    messages.append(ask(site.http, "grows", messages))
    open_list(page, site, "?search=grows")
    drift = "document.querySelector('tr[data-id=grows] .drift').textContent"
    until(page, f"/none|≠/.test({drift})")
    first = site.http.get("/view/api/measures?ids=grows").json()["measures"]["grows"]["drift"]["tokens"]
    ask(site.http, "grows", [*messages, {"role": "user", "content": "What is 2 plus 2?"}])
    (answer,) = site.http.get("/view/api/measures?ids=grows").json()["measures"].values()
    assert answer["drift"]["tokens"] > first
    changed = answer["drift"]["changed_tokens"]
    shown = f"≠ {changed} token{'s' if changed > 1 else ''}" if changed else "none"
    until(page, f"{drift} === '{shown}'")
    until(page, "document.querySelector('tr[data-id=grows] .turns').textContent === '2'")
    site.http.delete("/sessions/grows")


def only(name: str) -> str:
    return f"[...document.querySelectorAll('td.session a')].map((a) => a.textContent).join() === '{name}'"


def test_verdicts_roles_and_metadata_are_columns_and_filters(page: Page, site: Site) -> None:
    open_list(page, site, "?search=o")
    page.locator("tr[data-id=forked] td.verdict .badge").wait_for()
    until(page, "document.querySelector('tr[data-id=shop] td.verdict').textContent === 'exact'")
    assert page.locator("tr[data-id=shop] td.role").inner_text() == "main"
    assert page.locator("tr[data-id=weights] td.weights").count() == 0
    page.locator("#search").fill("")
    page.locator("#verdict").select_option("forked")
    until(page, only("forked"))
    page.locator("#verdict").select_option("")
    page.locator("#weights").fill("step-20")
    until(page, only("weights"))
    until(page, "document.querySelector('td.weights').textContent === '0 … step-20'")
    page.locator("#weights").fill("")
    page.locator("#metadata").fill("number=77")
    page.keyboard.press("Enter")
    until(page, only("small-077"))
    assert page.locator("th.key").all_inner_texts() == ["number"]
    page.reload()
    page.wait_for_selector(".chip")
    assert names(page) == ["small-077"]
    page.locator(".menu summary").click()
    page.locator(".menubox input").uncheck()
    assert page.locator("th.key").count() == 0
    page.locator(".chip").click()
    until(page, "document.querySelectorAll('td.session a').length === 100")


def test_names_of_javascript_are_names_like_others(page: Page, site: Site) -> None:
    site.http.post("/sessions", json={"session_id": "constructor", "metadata": {"toString": 1, "__proto__": 2}})
    open_list(page, site, "?search=o")
    row = "tr[data-id=constructor] td"
    until(page, f"document.querySelector('{row}.drift').textContent === '–'")
    assert page.locator(f"{row}.verdict").inner_text() == ""
    assert page.locator("tr[data-id=shop] td.key").all_inner_texts()[:2] == ["", ""]
    site.http.delete("/sessions/constructor")


def test_metadata_that_no_filter_can_spell_is_no_button(page: Page, site: Site) -> None:
    site.http.post("/sessions", json={"session_id": "spelled", "metadata": {"a=b": 1, "two": "lines\n", "c": 1}})
    open_list(page, site, "?search=spelled")
    assert page.locator("td.key").count() == 3
    assert page.locator("td.key button").all_inner_texts() == ["1"]
    site.http.delete("/sessions/spelled")


def test_sessions_are_searched_and_filtered(page: Page, site: Site) -> None:
    open_list(page, site)
    page.keyboard.press("/")
    page.keyboard.type("small-07")
    until(page, "document.querySelectorAll('tbody tr').length === 10")
    assert page.locator(".listhead p").inner_text() == "10 sessions found"
    page.locator("#search").fill("")
    page.locator("#fork").select_option("edited_history")
    until(page, "document.querySelectorAll('td.session a').length === 1")
    assert names(page) == ["forked"]
    page.locator("#fork").select_option("")
    page.locator("#reward_min").fill("0.5")
    until(page, "document.querySelector('td.session a').textContent === 'shop'")
    assert names(page) == ["shop"]
    page.reload()
    page.wait_for_selector("td.session a")
    assert names(page) == ["shop"]
    page.locator("#search").fill("no such thing")
    page.wait_for_selector("td.empty")


def test_session_can_be_opened_by_keys_alone(page: Page, site: Site) -> None:
    open_list(page, site, "?search=shop")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".row [data-i]")
    assert page.title() == "shop · Tokentape"
    page.keyboard.press("g")
    page.keyboard.press("s")
    page.wait_for_selector("tbody tr")


def test_new_sessions_appear_in_the_list(page: Page, site: Site) -> None:
    open_list(page, site)
    site.http.post("/sessions", json={"session_id": "just-begun"})
    page.wait_for_selector("tr[data-id=just-begun]")
    # Without tokens, the drift is unknown.
    until(page, "document.querySelector('tr[data-id=just-begun] .drift').textContent === '–'")
    site.http.delete("/sessions/just-begun")


def test_tree_shows_forks_retries_and_aborted_turns(page: Page, site: Site, shot: Shot) -> None:
    page.goto(site.at("/session/forked"))
    page.wait_for_selector(".row [data-i]")
    lines = page.locator(".turnline")
    texts = [re.sub(r"\s+", " ", text) for text in lines.all_inner_texts()]
    assert len(texts) == 5
    assert any("↳ sibling" in text for text in texts)
    assert any("↳ edited_history" in text for text in texts)
    assert any("aborted: client_left" in text for text in texts)
    assert page.locator(".tree > p").inner_text() == "5 turns · 3 branches · 3 forks · 1 aborted"
    assert "retry" in (page.locator(".turnline .badge.fork", has_text="sibling").get_attribute("title") or "")
    page.locator(".turnline", has_text="turn 1").click()
    until(page, "document.querySelector('.sessionhead').textContent.includes('branch to turn 1')")
    page.locator(".turnfoot .badge", has_text="turn 2 goes another way").wait_for()
    page.locator(".turnfoot .badge", has_text="was aborted here").wait_for()
    shot(page, "forks")
    page.keyboard.press("f")
    assert page.locator(".row .at").count() == 1


def test_branch_explains_that_no_token_is_trained_twice(page: Page, site: Site) -> None:
    page.goto(site.at("/session/forked/leaf/2"))
    page.wait_for_selector(".row [data-i]")
    assert "no loss: an earlier branch trains it" in page.locator(".turnhead").first.inner_text()
    assert "verdict" not in page.locator(".sessionhead").inner_text()
    assert "forked: sibling" in page.locator(".sessionhead").inner_text()


def test_a_running_session_grows_on_the_page(page: Page, site: Site) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello, I am Olga."}]
    reply = ask(site.http, "running", messages)
    page.goto(site.at("/session/running"))
    page.wait_for_selector(".row [data-i]")
    page.keyboard.press("Home")
    page.evaluate("window.kept = document.querySelector('.turn')")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    messages += [reply, {"role": "user", "content": "What is 2 plus 2?"}]
    reply = ask(site.http, "running", messages)
    until(page, "document.querySelectorAll('.turn').length === 2")
    (trajectory,) = site.store.load_session("running").trajectories()
    assert page.locator(".sessionhead").inner_text().count(f"{len(trajectory.token_ids)} tokens") == 1
    assert page.evaluate("window.kept === document.querySelector('.turn')")
    until(page, "location.hash === '#/session/running/leaf/1/token/0'")
    assert page.locator(".row .at").get_attribute("data-i") == "0"
    # Only new data has been sent.
    (fetched,) = [url for url in asked if re.search(r"leaves/\d+\?from", url)]
    assert fetched.endswith(f"leaves/1?from={trajectory.completion_ends[0]}")
    page.keyboard.press("End")
    page.locator(f'[data-i="{len(trajectory.token_ids) - 1}"]').wait_for()
    ids = page.locator(".facts dd code").first.inner_text()
    assert ids == str(trajectory.token_ids[-1])
    site.http.delete("/sessions/running")


def test_a_session_without_turns_waits_for_its_first(page: Page, site: Site) -> None:
    site.http.post("/sessions", json={"session_id": "empty"})
    page.goto(site.at("/session/empty"))
    page.get_by_text("No turn is recorded yet.").wait_for()
    ask(site.http, "empty", [{"role": "user", "content": "Hello"}])
    page.wait_for_selector(".row [data-i]")
    site.http.delete("/sessions/empty")


def test_overview_shows_live_gateway_counts(page: Page, site: Site, shot: Shot) -> None:
    page.goto(site.at("/overview"))
    page.wait_for_selector(".cards .figure")
    recorded = page.locator(".card", has_text="Turns per second").locator(".dim")
    before = int(recorded.inner_text().split()[0])
    ask(site.http, "counted", [{"role": "user", "content": "Hello"}])
    until(page, f"document.querySelector('.cards .card .dim').textContent.startsWith('{before + 1} ')")
    page.wait_for_timeout(2500)
    shot(page, "overview")
    forks = page.locator(".card", has_text="Forks by cause").inner_text()
    assert {"sibling", "edited_history", "branched"} & set(forks.split())
    assert "client_left" in page.locator(".card", has_text="Aborted turns").inner_text()
    assert float(page.locator(".figure").first.inner_text()) > 0
    site.http.delete("/sessions/counted")


def test_key_is_requested_and_sent_only_in_a_header(page: Page, keyed_site: Site, shot: Shot) -> None:
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.goto(keyed_site.at("/session/mine"))
    page.locator("#key").fill("no-such-key-0123456789")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("alert").wait_for()
    shot(page, "sign-in")
    page.locator("#key").fill(ALICE)
    page.get_by_role("button", name="Show").click()
    page.wait_for_selector(".row [data-i]")
    page.reload()
    page.wait_for_selector(".row [data-i]")
    page.keyboard.press("g")
    page.keyboard.press("s")
    page.wait_for_selector("td.session a")
    assert names(page) == ["mine"]
    assert page.get_by_role("link", name="Overview").count() == 0
    assert not any(ALICE in url for url in [*urls, page.url])
    stores = "JSON.stringify([Object.entries(localStorage), document.cookie])"
    assert ALICE not in page.evaluate(stores)
    page.get_by_role("button", name="Sign out").click()
    page.locator("#key").wait_for()
    assert page.evaluate("JSON.stringify(sessionStorage)") == "{}"


def test_unknown_and_foreign_sessions_look_the_same_on_the_page(page: Page, keyed_site: Site) -> None:
    page.goto(keyed_site.at())
    page.locator("#key").fill(ALICE)
    page.get_by_role("button", name="Show").click()
    page.wait_for_selector("td.session a")
    shown = []
    for name in ("theirs", "nobodys"):
        page.goto(keyed_site.at(f"/session/{name}"))
        page.get_by_role("heading", name="Not found").wait_for()
        # The previous session stays until this session's response arrives.
        page.get_by_text(f"no session '{name}'").wait_for()
        shown.append(page.locator("main").inner_text().replace(name, "X"))
    assert shown[0] == shown[1]


def test_link_that_cannot_be_decoded_is_explained(page: Page, site: Site) -> None:
    page.goto(site.at("/garbage/%ff"))
    page.get_by_text("The link #/garbage/%ff is not valid").wait_for()


def test_failed_page_does_not_keep_the_title_of_the_page_before(page: Page, site: Site) -> None:
    page.goto(site.at("/session/shop"))
    until(page, "document.title === 'shop · Tokentape'")
    page.goto(site.at("/garbage/%ff"))
    until(page, "document.title === 'Not found · Tokentape'")


def test_metadata_cannot_reorder_the_heading(page: Page, site: Site) -> None:
    page.goto(site.at("/session/hostile"))
    assert page.locator(".sessionhead .metadata").inner_text() == r"user=\u202eabc"


def test_an_admin_sees_every_session_and_the_overview(page: Page, keyed_site: Site) -> None:
    page.goto(keyed_site.at())
    page.locator("#key").fill(OPS)
    page.get_by_role("button", name="Show").click()
    page.wait_for_selector("td.session a")
    assert names(page) == ["theirs", "mine"]
    page.get_by_role("link", name="Overview").click()
    page.wait_for_selector(".cards .figure")


LIGHT_ACCENT, DARK_ACCENT = (31, 95, 191), (127, 176, 255)
"""The color of the selection: `--accent` of the style sheet."""


def map_shows(page: Page, colour: tuple[int, int, int]) -> None:
    """Wait until a pixel of the map has this color. Read from a copy, since reading slows a canvas down."""
    until(
        page,
        """(() => {
          const map = document.querySelector(".minimap");
          const copy = new OffscreenCanvas(map.width, map.height).getContext("2d", { willReadFrequently: true });
          copy.drawImage(map, 0, 0);
          const { data } = copy.getImageData(0, 0, map.width, map.height);
          const is = (i) => [0, 1, 2].every((k) => data[i + k] === COLOUR[k]) && data[i + 3] === 255;
          return Array.from({ length: data.length / 4 }, (_, i) => 4 * i).some(is);
        })()""".replace("COLOUR", str(list(colour))),
    )


def test_theme_follows_the_system_until_changed(page: Page, site: Site, shot: Shot) -> None:
    def paper() -> str:
        colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return colour

    page.emulate_media(color_scheme="light")
    page.goto(site.at("/session/shop/token/200"))
    page.wait_for_selector(".row .at")
    light = paper()
    page.emulate_media(color_scheme="dark")
    dark = paper()
    assert light != dark
    map_shows(page, DARK_ACCENT)
    shot(page, "dark")
    page.keyboard.press("t")
    assert paper() == light
    map_shows(page, LIGHT_ACCENT)
    page.keyboard.press("t")
    assert paper() == dark
    map_shows(page, DARK_ACCENT)
    page.emulate_media(color_scheme="light")
    assert paper() == dark
    page.reload()
    assert paper() == dark


def test_keyboard_shortcuts_are_listed(page: Page, site: Site, shot: Shot) -> None:
    page.goto(site.at("/session/shop"))
    page.wait_for_selector(".row [data-i]")
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    shot(page, "keys")
    assert "next difference" in page.get_by_role("dialog").inner_text()
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", VIEWS)
def test_views_pass_accessibility_checks(page: Page, site: Site, name: str, scheme: str) -> None:
    """Return the serious and critical violations of axe-core: contrast, names, roles, order, focus."""
    axe = pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python, which has axe-core")
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(site.at(VIEWS[name]))
    page.wait_for_selector("td.drift .badge, .row [data-i], .sides, .figure, main > .card")
    page.wait_for_timeout(600)
    assert serious(page, axe) == []


def test_sign_in_passes_accessibility_checks(page: Page, keyed_site: Site) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="needs axe-playwright-python, which has axe-core")
    page.goto(keyed_site.at())
    page.locator("#key").wait_for()
    assert serious(page, axe) == []


def serious(page: Page, axe: Any) -> list[Any]:
    source = (Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    page.evaluate(f"(() => {{{source}\n}})()")
    violations = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        (violation["id"], violation["help"], [node["html"][:200] for node in violation["nodes"][:3]])
        for violation in violations["violations"]
        if violation["impact"] in ("serious", "critical")
    ]


@pytest.fixture
def filed(site: Site, tmp_path: Path) -> Path:
    path = tmp_path / "some.parquet"
    write_parquet(site.store.load_session("shop", per_token=True).trajectories(), path)
    return path


@pytest.fixture
def of_file(filed: Path) -> Iterator[tuple[str, Trajectory]]:
    """Open a page of a file with an unknown tokenizer."""
    viewer = file_viewer(filed)
    with running(create_app(viewer)) as url:
        yield url, viewer.source.load("shop").trajectories[0]


def test_without_a_tokenizer_the_ids_are_shown(page: Page, of_file: tuple[str, Trajectory], shot: Shot) -> None:
    url, trajectory = of_file
    page.goto(f"{url}/view#/session/shop/view/tokens")
    page.wait_for_selector(".row [data-i]")
    shot(page, "ids-only")
    shown = page.locator(".row [data-i]").all_text_contents()
    assert [int(text) for text in shown] == trajectory.token_ids[: len(shown)].tolist()
    # No line break splits an id.
    assert page.evaluate(
        "[...document.querySelectorAll('.row [data-i]')].every((token) => token.getClientRects().length === 1)"
    )
    assert page.get_by_text("ids only").count() == 1
    assert page.get_by_role("button", name="Recorded vs. retokenized").is_disabled()
    page.keyboard.press("n")
    assert page.locator(".live").count() == 0
    page.goto(f"{url}/view#/sessions")
    page.wait_for_selector("td.aborted")
    # A file has no aborted turns, so their number is unknown.
    assert page.locator("td.aborted").all_inner_texts() == ["–"]


def test_file_is_compared_with_its_retokenized_text(page: Page, filed: Path, model_dir: Path, site: Site) -> None:
    with running(create_app(file_viewer(filed, model_dir))) as url:
        page.goto(f"{url}/view#/session/shop")
        page.wait_for_selector(".driftcount")
        assert page.locator("#side option").all_text_contents() == ["text tokenized again"]
        trajectory = site.store.load_session("shop").trajectories()[0]
        ids = trajectory.token_ids[np.flatnonzero(trajectory.provenance == 1)[:1]]
        assert ids.size == 1


def test_page_is_readable_in_a_narrow_window(browser: Browser, site: Site, shot: Shot) -> None:
    with new_context(browser, 700) as context:
        page = context.new_page()
        page.goto(site.at("/session/shop/token/200"))
        page.wait_for_selector(".row .at")
        shot(page, "narrow")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_tokens_have_room_on_a_page_at_twice_its_size(page: Page, site: Site, shot: Shot) -> None:
    page.set_viewport_size({"width": 720, "height": 450})
    page.goto(site.at("/session/shop/token/200"))
    page.wait_for_selector(".row .at")
    shot(page, "zoomed")
    assert page.evaluate("document.querySelector('.pane').clientHeight") > 300
    page.locator(".inspector button").last.click()


WIDTHS = (420, 1000, 1600)

HOSTILE_NAME = "<img src=x onerror=window.hurt=1>"


@pytest.mark.parametrize("name", VIEWS)
def test_views_fit_at_each_width(page: Page, site: Site, name: str, shot: Shot) -> None:
    page.goto(site.at(VIEWS[name]))
    page.wait_for_selector("td.drift .badge, .row [data-i], .sides, .figure, main > .card")
    fits(page, name, shot)


def test_scroll_bars_are_as_dark_as_the_page(page: Page, site: Site) -> None:
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 420, "height": 900})
    page.goto(site.at("/overview"))
    page.wait_for_selector(".figure")
    with Image.open(io.BytesIO(page.screenshot(caret="initial"))) as picture:
        edge = picture.convert("L").crop((picture.width - 8, 100, picture.width, picture.height))
    # The lightest of an edge without text: a bar that ignores the theme is white.
    assert max(edge.tobytes()) < 128


def fits(page: Page, name: str, shot: Shot) -> None:
    """Check that nothing overflows the window or overlaps, with screenshots of both color schemes."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            shot(page, f"{name}-{width}-{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(OVERLAPPING) == []


OVERLAPPING = """(() => {
  const parts = [...document.querySelectorAll(".sessionhead, .tree, .toolbar, .legend, .pane, .inspector, .chart > *")]
    .map((node) => [node.className || node.tagName, node.getBoundingClientRect()])
    .filter(([, { width, height }]) => width && height);
  const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const pairs = parts.flatMap((part, n) => parts.slice(n + 1).map((other) => [part, other]));
  return pairs.filter(([[, a], [, b]]) => over(a, b)).map(([[name], [other]]) => [name, other]);
})()"""


CONTROLS = "main button, main summary, main select, main input, main a[href], header button, main .fold, [data-i]"


@pytest.mark.parametrize("name", ["list", "hostile", "beside", "sessions"])
def test_hostile_text_is_never_executed_on_click(page: Page, site: Site, name: str) -> None:
    site.http.post("/sessions", json={"session_id": HOSTILE_NAME, "metadata": {HOSTILE_NAME: HOSTILE}})
    address = {"list": "/sessions?compare=hostile", "hostile": "/session/hostile"}.get(
        name, "/session/hostile/view/beside"
    )
    if name == "sessions":
        address = "/session/shop/with/session-hostile/view/beside"
    reopened(page, site.at(address), "tbody tr, .row [data-i], .sides")
    clicked = 0
    for n in range(min(40, page.locator(CONTROLS).count())):
        control = page.locator(CONTROLS).nth(n)
        # An earlier click may have removed the element.
        if control.count() and control.is_visible() and control.is_enabled():
            control.click(force=True)
            clicked += 1
            assert page.evaluate("[window.hurt, document.querySelectorAll('main img, main script').length]") == [
                None,
                0,
            ]
        if not page.url.startswith(site.at(address)):
            reopened(page, site.at(address), "tbody tr, .row [data-i], .sides")
    assert clicked > 15
    site.http.delete(f"/sessions/{quote(HOSTILE_NAME, safe='')}")
