"""The conversation in a real browser: folding, navigation, its tree, alternatives and lineage."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.records import SETUP, make_turn
from tests.viewer.conftest import Site, new_context, reopened, until
from tests.viewer.test_browser_run import run_beside
from tests.viewer.test_browser_tokens import ALL_TOKENS, chosen, facts, recorded
from tokentape.chat._renderer import Renderer
from tokentape.types import Provenance, SessionInfo

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = pytest.mark.browser

IN_VIEW = """(i) => {
  const box = (selector) => document.querySelector(selector)?.getBoundingClientRect();
  const [token, pane] = [`[data-i="${i}"]`, ".pane"].map(box);
  return Boolean(token && token.top >= pane.top && token.bottom <= pane.bottom);
}"""


def opened(page: Page, site: Site, path: str) -> None:
    reopened(page, site.at(path), ".row [data-i], .fold")


def held(page: Page, pattern: str) -> list[Route]:
    """Hold the requests that match a pattern and return the list that collects them."""
    routes: list[Route] = []
    page.route(pattern, lambda route: routes.append(route))
    return routes


def answered(page: Page, routes: list[Route]) -> None:
    """Wait until a request is held, and continue it."""
    deadline = time.monotonic() + 20
    while not routes:
        assert time.monotonic() < deadline, "no such request"
        page.wait_for_timeout(20)
    for route in routes:
        route.continue_()
    page.unroute_all()


def writers(page: Page) -> set[str]:
    """The writers of the tokens that are on the page."""
    return set(page.locator(".row .who .name").all_text_contents()) - {"⋮"}


@pytest.mark.parametrize("session_id", ["shop", "huge"])
def test_view_starts_at_the_first_completion(page: Page, site: Site, session_id: str) -> None:
    first = int(recorded(site, session_id).completion_starts[0])
    opened(page, site, f"/session/{session_id}")
    until(page, f"({IN_VIEW})({first})")
    assert page.locator(".row .at").count() == 0
    assert writers(page) <= {"user", "sampled", "assistant", "close"}


def test_folded_parts_unfold_to_every_token(page: Page, site: Site) -> None:
    trajectory = recorded(site, "shop")
    opened(page, site, "/session/shop")
    first = page.locator(".fold > button").first
    assert "template, system" in first.inner_text()
    first.click()
    assert {"template", "system"} <= writers(page)
    first.click()
    assert not {"template", "system"} & writers(page)
    for button in page.locator(".fold > button").all():
        button.click()
    seen: list[Any] = page.evaluate(ALL_TOKENS)
    assert [i for i, *_ in seen] == list(range(len(trajectory.token_ids)))


def test_keys_step_over_folded_parts(page: Page, site: Site) -> None:
    trajectory = recorded(site, "shop")
    last = int(trajectory.completion_ends[0]) - 1
    shown = next(i for i in range(last + 1, len(trajectory.token_ids)) if trajectory.provenance[i] not in (2, 3, 5))
    opened(page, site, f"/session/shop/token/{last}")
    page.keyboard.press("ArrowRight")
    assert chosen(page) == shown
    page.keyboard.press("ArrowLeft")
    assert chosen(page) == last


def test_search_finds_folded_text(page: Page, site: Site, renderer: Renderer) -> None:
    trajectory = recorded(site, "shop")
    pieces = [renderer.tokenizer.token_bytes(token) for token in trajectory.token_ids.tolist()]
    text, word = b"".join(pieces).lower(), b"price"
    ends = [len(b"".join(pieces[: n + 1])) for n in range(len(pieces))]
    places = [n for n in range(len(text)) if text.startswith(word, n)]
    tokens = list(dict.fromkeys(next(i for i, end in enumerate(ends) if end > place) for place in places))
    assert len(tokens) > 2
    opened(page, site, "/session/shop")
    page.keyboard.press("/")
    page.keyboard.type("PRICE")
    for n in (0, 1):
        page.locator("#find").press("Enter")
        assert chosen(page) == tokens[n]
        until(page, f"({IN_VIEW})({tokens[n]})")
        assert page.locator(".finder").inner_text().startswith(f"{n + 1} of {len(tokens)}")
    page.locator("#find").press("Shift+Enter")
    page.locator("#find").press("Shift+Enter")
    assert chosen(page) == tokens[-1]
    page.locator("#find").fill("no such words")
    page.locator("#find").press("Enter")
    page.get_by_text("Not found").wait_for()


def test_keys_jump_to_turns_and_sessions(page: Page, site: Site) -> None:
    trajectory = recorded(site, "shop")
    opened(page, site, "/session/shop")
    page.keyboard.press("g")
    page.keyboard.press("t")
    page.keyboard.type(str(trajectory.turns[1]))
    page.keyboard.press("Enter")
    assert chosen(page) == trajectory.completion_ends[0]
    # A turn of another branch.
    opened(page, site, "/session/forked/leaf/1")
    page.locator("#toturn").fill("3")
    page.locator("#toturn").press("Enter")
    until(page, "document.querySelector('.sessionhead').textContent.includes('branch to turn 3')")
    page.goto(site.at("/sessions?search=small-00&sort=session&order=asc"))
    until(page, "document.querySelectorAll('td.session a').length === 10")
    page.locator("td.session a").nth(3).click()
    page.wait_for_selector(".row [data-i]")
    for key, name in (("J", "small-004"), ("K", "small-003"), ("K", "small-002")):
        page.keyboard.press(key)
        until(page, f"document.title === '{name} · Tokentape'")
        page.wait_for_selector(".row [data-i]")


def test_session_of_a_filtered_list_keeps_the_filter_in_another_tab(page: Page, site: Site) -> None:
    page.goto(site.at("/sessions?search=small-00&sort=session&order=asc"))
    until(page, "document.querySelectorAll('td.session a').length === 10")
    address = page.locator("td.session a").nth(8).get_attribute("href")
    with page.context.new_page() as other:
        other.goto(site.at(str(address)[1:]))
        other.wait_for_selector(".row [data-i]")
        other.keyboard.press("J")
        until(other, "document.title === 'small-009 · Tokentape'")
        other.wait_for_selector(".row [data-i]")
        other.keyboard.press("J")
        other.get_by_text("No more session in the last shown list").wait_for()


def test_the_tree_follows_the_turn_in_view(page: Page, site: Site) -> None:
    page.set_viewport_size({"width": 1000, "height": 300})
    trajectory = recorded(site, "shop")
    opened(page, site, "/session/shop/turn/0")
    current = "document.querySelector('.turnline[aria-current]').dataset.turn"
    until(page, f"{current} === '0'")
    page.locator(".pane").evaluate("(pane) => pane.scrollTo(0, pane.scrollHeight)")
    until(page, f"{current} === '{trajectory.turns[-1]}'")
    assert page.locator("#toturn").get_attribute("placeholder") == str(trajectory.turns[-1])


def test_tree_is_available_in_a_narrow_window(browser: Browser, site: Site) -> None:
    with new_context(browser, 420) as context:
        page = context.new_page()
        opened(page, site, "/session/forked/leaf/1")
        assert not page.locator(".tree").is_visible()
        page.get_by_role("button", name="Turns").click()
        page.locator(".turnline[data-turn='3']").click()
        until(page, "document.querySelector('.sessionhead').textContent.includes('branch to turn 3')")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_alternatives_are_shown_where_requested(page: Page, site: Site) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "temperature": 1,
        "logprobs": True,
        "top_logprobs": 3,
    }
    reply = site.http.post("/sessions/tops/v1/chat/completions", json=body).json()
    logprobs = reply["choices"][0]["logprobs"]["content"]
    trajectory = recorded(site, "tops")
    start = int(trajectory.completion_starts[0])
    opened(page, site, f"/session/tops/token/{start + 1}")
    rows = page.locator(".alternatives tr")
    rows.first.wait_for()
    assert rows.count() == 3
    for row, alternative in zip(rows.all(), logprobs[1]["top_logprobs"], strict=True):
        cells = row.locator("td").all_inner_texts()
        assert float(cells[2]) == pytest.approx(math.exp(alternative["logprob"]), rel=1e-3)
    opened(page, site, f"/session/shop/token/{int(recorded(site, 'shop').completion_starts[0])}")
    assert facts(page)["alternatives"] == "not recorded"
    site.http.delete("/sessions/tops")


def test_branches_are_shown_side_by_side(page: Page, site: Site) -> None:
    opened(page, site, "/session/forked/leaf/1")
    page.locator("#side").select_option("leaf-2")
    page.keyboard.press("s")
    page.wait_for_selector(".sides.changed")
    heads = [" ".join(text.split()) for text in page.locator(".sides.head h3").all_inner_texts()]
    assert heads == ["branch to turn 1 exact no reward", "branch to turn 2 forked: sibling no reward"]
    assert all(page.locator(f".side.{side} .m").count() for side in ("recorded", "other"))
    until(page, "location.hash.includes('/with/leaf-2/view/beside')")
    page.keyboard.press("n")
    assert page.locator(".sides.changed.at").count() == 1


def test_keys_pressed_while_a_session_loads_apply_to_it(page: Page, site: Site) -> None:
    page.goto(site.at("/sessions?search=small-01&sort=session&order=asc"))
    until(page, "document.querySelectorAll('td.session a').length === 10")
    page.locator("td.session a").first.click()
    until(page, "document.title === 'small-010 · Tokentape'")
    waiting = held(page, "**/api/sessions/small-011")
    for _ in range(3):
        page.keyboard.press("J")
    answered(page, waiting)
    until(page, "document.title === 'small-013 · Tokentape'")


def test_closed_view_does_not_change_the_address(page: Page, site: Site) -> None:
    opened(page, site, "/session/shop/view/tokens")
    waiting = held(page, "**/api/sessions/small-000")
    page.evaluate("location.hash = '#/session/small-000'")
    page.locator(".row [data-i]").first.click()
    # A view updates the address after 80 ms: this timer fires after that.
    page.evaluate("new Promise((done) => setTimeout(done, 90))")
    answered(page, waiting)
    until(page, "document.title === 'small-000 · Tokentape'")
    assert page.evaluate("location.hash") == "#/session/small-000"


def test_late_address_update_does_not_undo_a_navigation(page: Page, site: Site) -> None:
    opened(page, site, "/session/shop/view/tokens")
    page.evaluate(
        """() => {
          document.dispatchEvent(new KeyboardEvent("keydown", { key: "l" }));
          // Fires shortly before the address update, which then runs before the page gets the new address.
          setTimeout(() => (location.hash = "#/sessions"), 60);
          const late = performance.now() + 200;
          while (performance.now() < late);
        }"""
    )
    until(page, "document.title === 'Sessions · Tokentape'")


def test_each_side_is_requested_once(page: Page, site: Site) -> None:
    opened(page, site, "/session/forked/leaf/1")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    waiting = held(page, "**/comparison*")
    page.locator("#side").select_option("leaf-2")
    page.keyboard.press("s")
    until(page, "document.querySelector('.pane').textContent === 'Comparing…'")
    answered(page, waiting)
    page.wait_for_selector(".sides.changed")
    page.keyboard.press("v")
    page.keyboard.press("s")
    page.wait_for_selector(".sides.changed")
    assert sum("comparison" in url for url in requests) == 1


def test_only_rows_near_the_view_are_drawn_side_by_side(page: Page, site: Site, renderer: Renderer) -> None:
    letters = [token for letter in "pears and " for token in renderer.tokenizer.encode_plain(letter)]
    ids = np.array(letters * 1500, np.int32)
    turn = make_turn("letters", 0, completion_ids=ids, logprobs=np.zeros(len(ids), np.float32), tokens=2)
    run_beside(site.store.write(SessionInfo("letters", 1.0), SETUP, turn))
    page.goto(site.at("/session/letters/view/beside"))
    page.wait_for_selector(".sides.changed")
    differences = int(page.locator(".driftcount").inner_text().split()[3].replace(",", ""))
    assert differences > 1000
    assert page.evaluate("document.querySelectorAll('*').length") < 5_000
    page.keyboard.press("p")
    page.locator(".sides.changed.at").wait_for()
    run_beside(site.store.delete_session("letters"))


def test_lineage_is_in_the_tree(page: Page, site: Site) -> None:
    edges = site.http.get("/view/api/sessions/forked").json()["lineage"]
    assert edges
    opened(page, site, "/session/forked")
    for edge in edges:
        origin = page.locator(f".turnline[data-turn='{edge['turn']}'] + .origin")
        parent = "another turn" if edge["parent"] is None else f"turn {edge['parent']}"
        assert origin.inner_text() == f"⤷ {edge['kind']} of {parent}"
        assert edge["evidence"] in (origin.get_attribute("title") or "")


def test_all_writers_are_in_the_legend(page: Page, site: Site) -> None:
    opened(page, site, "/session/shop")
    legend = page.locator(".legend").inner_text()
    for code in Provenance:
        assert code is Provenance.MEDIA or code.name.lower() in legend
