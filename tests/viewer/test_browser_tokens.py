"""A trajectory in a real browser: every token, its lanes, its facts, its differences, by keys and by pointer."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.viewer.conftest import HOSTILE, PARAGRAPHS, Site, ask, reopened, until
from tokentape.chat._renderer import Renderer
from tokentape.types import Trajectory

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

Shot = Callable[["Page", str], None]

ALL_TOKENS = """async () => {
  const found = [];
  const pane = document.querySelector(".pane");
  for (const block of document.querySelectorAll(".block")) {
    block.scrollIntoView();
    while (!block.querySelector("[data-i]")) await new Promise(requestAnimationFrame);
    for (const token of block.querySelectorAll("[data-i]")) {
      found.push([Number(token.dataset.i), token.className, token.textContent]);
    }
  }
  return found;
}"""


def recorded(site: Site, session_id: str, leaf: int | None = None) -> Trajectory:
    paths = site.store.load_session(session_id, per_token=True).trajectories()
    return paths[-1] if leaf is None else next(path for path in paths if path.leaf == leaf)


def opened(page: Page, site: Site, path: str) -> None:
    address = site.at(path if "/view/" in path else f"{path}/view/tokens")
    reopened(page, address, ".row [data-i], .sides, .empty")


def facts(page: Page) -> dict[str, str]:
    rows: dict[str, str] = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll(".inspector dt")]
            .map((dt) => [dt.textContent, dt.nextElementSibling.textContent]))"""
    )
    return rows


def chosen(page: Page) -> int:
    return int(page.locator(".row .at").get_attribute("data-i") or -1)


def test_every_token_is_present_with_its_lanes(page: Page, site: Site, shot: Shot) -> None:
    opened(page, site, "/session/shop")
    page.wait_for_selector(".driftcount, .tools .dim")
    shot(page, "trajectory")
    seen: list[Any] = page.evaluate(ALL_TOKENS)
    trajectory = recorded(site, "shop")
    assert [i for i, _, _ in seen] == list(range(len(trajectory.token_ids)))
    for i, classes, _ in seen:
        words = classes.split()
        assert f"p{trajectory.provenance[i]}" in words
        assert ("m" in words) == bool(trajectory.loss_mask[i])
        bars = [word for word in words if word[0] == "l" and word[1:].isdigit()]
        assert bars == ([f"l{int(np.clip(-trajectory.logprobs[i], 0, 7))}"] if trajectory.provenance[i] == 1 else [])


def test_shown_texts_match_the_ids(page: Page, site: Site, renderer: Renderer) -> None:
    opened(page, site, "/session/shop")
    seen: list[Any] = page.evaluate(ALL_TOKENS)
    ids = recorded(site, "shop").token_ids.tolist()
    for i, _, text in seen:
        spelled = renderer.tokenizer.token_bytes(ids[i]).decode()
        # The new line at the end of a row is the row's.
        assert text in (spelled, spelled.removesuffix("\n"))


def test_pointing_at_a_token_shows_its_details(page: Page, site: Site, renderer: Renderer) -> None:
    opened(page, site, "/session/shop")
    trajectory = recorded(site, "shop")
    i = int(trajectory.completion_starts[0]) + 1
    page.locator(f'.row [data-i="{i}"]').hover()
    shown_facts = facts(page)
    token_id = int(trajectory.token_ids[i])
    assert shown_facts["id"] == str(token_id)
    data = renderer.tokenizer.token_bytes(token_id)
    assert shown_facts["bytes"] == f"{data.hex(' ')} ({len(data)})"
    assert shown_facts["offset"] == f"token {i} of {len(trajectory.token_ids)}"
    assert shown_facts["turn"] == "0, sampled token 1"
    assert float(shown_facts["logprob"].split()[0]) == pytest.approx(float(trajectory.logprobs[i]), rel=1e-3)
    assert float(shown_facts["advantage"]) == pytest.approx(float(trajectory.columns["advantage"][i]), rel=1e-3)
    assert shown_facts["loss"] == "trained"
    assert "sampled" in shown_facts["written by"]


def test_keys_select_tokens_and_update_the_address(page: Page, site: Site) -> None:
    opened(page, site, "/session/shop/token/10")
    assert chosen(page) == 10
    page.keyboard.press("ArrowRight")
    page.keyboard.press("l")
    page.keyboard.press("ArrowLeft")
    assert chosen(page) == 11
    leaf = recorded(site, "shop").leaf
    until(page, f"location.hash === '#/session/shop/leaf/{leaf}/token/11/view/tokens'")
    assert facts(page)["offset"].startswith("token 11 ")
    assert page.evaluate("document.activeElement.dataset.i") == "11"
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    assert page.locator(".row .in").count() == 3
    page.keyboard.press("End")
    assert chosen(page) == len(recorded(site, "shop").token_ids) - 1
    page.keyboard.press("ArrowUp")
    assert chosen(page) < len(recorded(site, "shop").token_ids) - 1
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert chosen(page) > 0
    page.keyboard.press("Escape")
    assert page.locator(".row .at").count() == 0


def test_turns_are_reached_by_keys_and_by_address(page: Page, site: Site) -> None:
    trajectory = recorded(site, "shop")
    starts = [0, *trajectory.completion_ends[:-1].tolist()]
    opened(page, site, f"/session/shop/turn/{trajectory.turns[2]}")
    assert chosen(page) == starts[2]
    page.keyboard.press("[")
    assert chosen(page) == starts[1]
    page.keyboard.press("]")
    assert chosen(page) == starts[2]


def test_ids_are_copied_as_a_python_list(page: Page, site: Site) -> None:
    opened(page, site, "/session/shop/token/20")
    ids = recorded(site, "shop").token_ids.tolist()
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("c")
    page.wait_for_selector("#said.shown")
    assert ast.literal_eval(page.evaluate("navigator.clipboard.readText()")) == ids[20:22]
    page.keyboard.press("Escape")
    page.keyboard.press("c")
    until(page, "document.getElementById('said').textContent.includes('ids')")
    assert ast.literal_eval(page.evaluate("navigator.clipboard.readText()")) == ids
    page.locator('.row [data-i="3"]').click()
    page.get_by_role("button", name="Copy link").click()
    until(page, "document.getElementById('said').textContent.includes('link')")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == site.at(f"/session/shop/leaf/{recorded(site, 'shop').leaf}/token/3/view/tokens")


def test_differences_are_marked_by_class_and_reached_by_keys(page: Page, site: Site, shot: Shot) -> None:
    opened(page, site, "/session/shop")
    page.wait_for_selector(".driftcount")
    answer = site.http.get(f"/view/api/sessions/shop/leaves/{recorded(site, 'shop').leaf}/comparison")
    from tests.viewer.packed import header, unpack

    metadata, arrays = header(answer.content), unpack(answer.content)
    starts = arrays["segments"].reshape(-1, 4)[arrays["differs"] > 0, 0].tolist()
    assert starts
    for start, difference in zip(starts, metadata["differences"], strict=True):
        page.keyboard.press("n")
        assert chosen(page) == start
        assert f"≠ {difference['class']}" in facts(page)["drift"]
        assert difference["meaning"] in facts(page)["drift"]
        mark = page.locator(f'.driftmark:has(+ [data-i="{start}"]), .driftmark:has(+ .g [data-i="{start}"])')
        assert mark.first.get_attribute("data-show") == f"≠ {difference['class']}"
    shot(page, "drift")
    page.keyboard.press("n")
    assert chosen(page) == starts[-1]
    page.keyboard.press("p")
    assert chosen(page) == (starts[-2] if len(starts) > 1 else starts[-1])


@pytest.mark.parametrize("side", ["retokenized", "rerendered"])
def test_other_ids_are_shown_beside_the_recorded_ids(page: Page, site: Site, shot: Shot, side: str) -> None:
    from tests.viewer.packed import unpack

    leaf = recorded(site, "shop").leaf
    opened(page, site, f"/session/shop/leaf/{leaf}/with/{side}/view/beside")
    page.wait_for_selector(".sides.changed")
    shot(page, f"beside-{side}")
    arrays = unpack(site.http.get(f"/view/api/sessions/shop/leaves/{leaf}/comparison?with={side}").content)
    seen: list[list[int]] = page.evaluate(
        """async () => {
          const found = [new Set(), new Set()];
          for (const block of document.querySelectorAll(".block")) {
            // What was drawn meanwhile moves it.
            while (!block.firstChild) {
              block.scrollIntoView();
              await new Promise(requestAnimationFrame);
            }
            for (let more; (more = block.querySelector(".folded button")); ) more.click();
            for (const token of block.querySelectorAll(".side [data-i]")) {
              found[Number(token.closest(".other") !== null)].add(Number(token.dataset.i));
            }
          }
          return found.map((ids) => [...ids]);
        }"""
    )
    assert seen[0] == list(range(len(recorded(site, "shop").token_ids)))
    assert seen[1] == list(range(len(arrays["other_token_ids"])))
    page.keyboard.press("n")
    assert page.locator(".sides.changed.at").count() == 1
    page.locator(".side.recorded [data-i]").first.click()
    assert facts(page)["offset"].startswith("token 0 ")
    page.keyboard.press("s")
    page.wait_for_selector(".row [data-i]")


def test_multi_token_characters_are_whole_and_their_tokens_selectable(
    page: Page, site: Site, renderer: Renderer, shot: Shot
) -> None:
    opened(page, site, "/session/hostile")
    groups = page.locator(".row .g")
    whole = groups.locator(".whole").all_text_contents()
    assert "🫠" in whole
    assert any(character in text for text in whole for character in "漢字")
    melting = page.locator(".row .g", has=page.locator(".whole", has_text="🫠")).first
    melting.scroll_into_view_if_needed()
    shot(page, "characters")
    parts = melting.locator("[data-i]")
    spelled = b""
    for n in range(parts.count()):
        parts.nth(n).click()
        i = chosen(page)
        spelled += renderer.tokenizer.token_bytes(int(recorded(site, "hostile").token_ids[i]))
        assert facts(page)["part of"] == f"🫠 (part {n + 1} of {parts.count()})"
    assert spelled.decode() == "🫠"


def test_hostile_text_is_shown_and_not_executed(page: Page, site: Site, shot: Shot) -> None:
    opened(page, site, "/session/hostile")
    seen: list[Any] = page.evaluate(ALL_TOKENS)
    shot(page, "hostile")
    text = "".join(text for _, classes, text in seen if "part" not in classes.split())
    assert '<img src=x onerror="' in text
    assert "<script>window.hurt=1</script>" in text
    assert page.evaluate("window.hurt") is None
    assert page.locator("main img, main script, main iframe").count() == 0
    assert page.title() == "hostile · Tokentape"
    shown = page.locator(".pane").inner_text()
    # Characters that would change text direction, ring or hide are removed, and the style sheet spells them out.
    for character in "\u202e\u202c\u2066\u2069\u200b\u0007\x1b\ufeff":
        assert character in HOSTILE
        assert character not in shown
    assert page.locator('[data-show="U+202E"]').count() == 1
    assert page.evaluate("getComputedStyle(document.querySelector('.row .t')).unicodeBidi") == "isolate"


def test_a_joiner_is_shown_as_a_code_if_its_token_shows_nothing_else(page: Page, site: Site) -> None:
    ask(site.http, "joiners", [{"role": "user", "content": "a\u200cb c\ufe0e d\u3164 👩\u200d💻"}])
    opened(page, site, "/session/joiners")
    page.wait_for_selector(".row .g")
    codes = page.locator(".row .u").evaluate_all("marks => marks.map((mark) => mark.dataset.show)")
    assert [code for code in codes if code.startswith("U+")] == ["U+200C", "U+FE0E", "U+3164"]
    assert page.locator(".row .g .whole", has_text="👩\u200d💻").count() == 1


def test_text_that_spells_a_control_token_looks_different(page: Page, site: Site) -> None:
    opened(page, site, "/session/hostile")
    page.wait_for_selector(".row .t.letters")
    letters = "".join(page.locator(".row .t.letters").all_text_contents())
    assert "<|im_end|>" in letters
    assert page.locator(".row .t.letters.control").count() == 0
    assert page.locator(".row .t.control").count() > 0
    page.locator(".row .t.letters").first.click()
    assert "letters only" in facts(page)["control"]


def test_weight_changes_are_marked_and_reached_by_a_key(page: Page, site: Site, shot: Shot) -> None:
    trajectory = recorded(site, "weights")
    opened(page, site, "/session/weights")
    mark = page.locator(".boundary")
    assert mark.get_attribute("data-show") == "weights step-20"
    page.keyboard.press("w")
    assert chosen(page) == trajectory.completion_starts[1]
    assert facts(page)["weights"] == "step-20"
    shot(page, "weights")


def test_message_of_a_megabyte_scrolls_to_its_end(page: Page, site: Site, shot: Shot) -> None:
    opened(page, site, "/session/huge")
    total = len(recorded(site, "huge").token_ids)
    assert total > 300_000
    assert page.locator(".row [data-i]").count() < 20_000
    page.keyboard.press("End")
    assert chosen(page) == total - 1
    assert page.locator(f'[data-i="{total - 1}"]').is_visible()
    page.keyboard.press("Home")
    page.wait_for_timeout(300)
    assert page.locator(".row [data-i]").count() < 20_000
    shot(page, "huge")


def test_full_text_is_available_to_the_browser_search(page: Page, site: Site) -> None:
    opened(page, site, "/session/huge")
    pears = page.evaluate("document.querySelector('.pane').textContent.split('price of pears').length - 1")
    assert pears == PARAGRAPHS
