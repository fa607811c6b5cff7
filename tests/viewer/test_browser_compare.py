"""Two sessions side by side in a real browser: how to get there, shown details, drawing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pytest

from tests.records import SETUP, make_turn
from tests.viewer.conftest import Site, reopened, until
from tests.viewer.test_browser_run import run_beside
from tests.viewer.test_browser_tokens import facts, recorded
from tokentape.chat._renderer import Renderer
from tokentape.types import Provenance, Reward, SessionInfo, Turn

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

QUESTION = "What do pears and plums cost, and which of the two is the cheaper one, if you add ten percent to each?"
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
REPLIES = {
    "twin-a": "Let me look up what pears cost.<|im_end|>",
    "twin-b": "Let me look up what all the plums cost.<|im_end|>",
    "twin-c": "Pears.<|im_end|>",
}
GROUP = "p 1&=x"


def sampled(session_id: str, added: list[int], completion: list[int]) -> Turn:
    return make_turn(
        session_id,
        0,
        added_ids=np.array(added, np.int32),
        added_provenance=np.full(len(added), Provenance.USER, np.uint8),
        completion_ids=np.array(completion, np.int32),
        logprobs=-np.arange(len(completion), dtype=np.float32) / 4,
    )


@pytest.fixture(scope="module", autouse=True)
def twins(browser: Any, site: Site, renderer: Renderer) -> Iterator[None]:
    """Return the sessions of a group: the first reply has reward 1, the others 0."""
    encode = renderer.tokenizer.encode_plain
    for name, reply in reversed(REPLIES.items()):
        turn = sampled(name, encode(PROMPT), encode(reply))
        info = SessionInfo(name, 9.0, {"group": GROUP})
        run_beside(site.store.write(info, SETUP, turn, Reward(name, None, float(name == "twin-a"), 9.0)))
    yield
    for name in REPLIES:
        run_beside(site.store.delete_session(name))


def equal_tokens(site: Site) -> int:
    left, other = (recorded(site, name).token_ids for name in ("twin-a", "twin-b"))
    return int(np.flatnonzero(left[: len(other)] != other[: len(left)])[0])


def compared(page: Page, left: str, other: str) -> None:
    until(page, f"document.querySelector('.sides.head')?.textContent.startsWith('{left}')")
    assert page.locator(".sides.head bdi").all_text_contents() == [left, other]


def of_group(page: Page, site: Site) -> None:
    reopened(page, site.at(f"/sessions?metadata={quote('group=' + GROUP, safe='')}"), "td.session a")


def test_two_sessions_of_the_list_are_compared_by_keys(page: Page, site: Site) -> None:
    of_group(page, site)
    assert page.locator("td.session a").all_text_contents() == list(REPLIES)
    for key in ("j", "x"):
        page.keyboard.press(key)
    chip = page.get_by_role("button", name="Do not compare twin-a").first
    chip.wait_for()
    assert page.evaluate("document.activeElement.textContent") == "twin-a"
    page.keyboard.press("Escape")
    assert chip.count() == 0
    for key in ("x", "j", "Enter"):
        page.keyboard.press(key)
    compared(page, "twin-a", "twin-b")
    # The sidebar has the sessions of the list without the session on the right.
    page.keyboard.press("J")
    compared(page, "twin-c", "twin-b")


def test_two_sessions_of_the_list_are_compared_by_mouse(page: Page, site: Site) -> None:
    of_group(page, site)
    page.get_by_role("button", name="Compare twin-c with another session").click()
    page.reload()
    page.get_by_role("button", name="Compare twin-c with twin-a").click()
    compared(page, "twin-c", "twin-a")
    page.go_back()
    page.locator("tr[data-id=twin-b] td.tokens").click()
    compared(page, "twin-c", "twin-b")


def test_session_links_to_its_group(page: Page, site: Site) -> None:
    reopened(page, site.at("/session/twin-b"), ".row [data-i]")
    page.get_by_role("link", name="another session…").click()
    page.wait_for_selector("td.session a")
    assert page.locator("td.session a").all_text_contents() == list(REPLIES)
    page.get_by_role("link", name="twin-a").click()
    compared(page, "twin-b", "twin-a")
    assert page.locator("#side option").all_text_contents()[-1] == "session twin-a"
    page.keyboard.press("x")
    until(page, "document.querySelector('.chip')?.textContent.includes('twin-b')")


def test_common_prefix_is_folded_and_differences_are_marked(page: Page, site: Site) -> None:
    reopened(page, site.at("/session/twin-a?compare=twin-b"), ".sides.changed")
    equal, trajectory = equal_tokens(site), recorded(site, "twin-a")
    assert page.locator(".folded").first.inner_text().startswith(f"⋯ {equal - 12} equal tokens")
    text = page.locator(".summary").inner_text()
    where = f"turn 0, sampled token {equal - trajectory.completion_starts[0]}"
    assert text.startswith(f"They differ from {where} on, after {equal} equal tokens: ")
    assert [text.strip() for text in page.locator(".sides.head .badge").all_text_contents()] == [
        *("exact", "reward 1"),
        *("exact", "reward 0"),
    ]
    while page.locator(".folded button").count():
        page.locator(".folded button").first.click()
    for side, name in ((".recorded", "twin-a"), (".other", "twin-b")):
        tokens = page.locator(f".side{side} [data-i]")
        trajectory = recorded(site, name)
        seen = tokens.evaluate_all("(all) => all.map((token) => [Number(token.dataset.i), token.className.split(' ')])")
        assert [i for i, _ in seen] == list(range(len(trajectory.token_ids)))
        for i, classes in seen:
            assert f"p{trajectory.provenance[i]}" in classes
            assert ("m" in classes) == bool(trajectory.loss_mask[i])
    before = page.locator(".sides:has(~ .sides.changed) .recorded [data-i]")
    assert int(before.last.get_attribute("data-i") or -1) + 1 == equal


def test_tokens_of_both_sides_are_inspected(page: Page, site: Site) -> None:
    reopened(page, site.at("/session/twin-a?compare=twin-b"), ".sides.changed")
    other = recorded(site, "twin-b")
    last = len(other.token_ids) - 1
    page.locator(f'.side.other [data-i="{last}"]').hover()
    shown_facts = facts(page)
    assert shown_facts["id"] == str(other.token_ids[last])
    assert shown_facts["offset"] == f"token {last} of {len(other.token_ids)}"
    assert float(shown_facts["logprob"].split()[0]) == pytest.approx(float(other.logprobs[last]), rel=1e-3)
    page.mouse.move(0, 0)
    page.keyboard.press("n")
    equal, trajectory = equal_tokens(site), recorded(site, "twin-a")
    assert page.locator(".recorded .at").get_attribute("data-i") == str(equal)
    assert facts(page)["id"] == str(trajectory.token_ids[equal])
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.i") == str(equal + 1)
    # Across folded parts.
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.locator(".recorded .at").get_attribute("data-i") == str(equal - 12)


def test_missing_session_is_reported(page: Page, site: Site) -> None:
    reopened(page, site.at("/session/twin-a?compare=nothing"), ".pane [role=alert]")
    assert "no session 'nothing'" in page.locator(".pane").inner_text()


def test_two_long_sessions_need_few_nodes(page: Page, site: Site, renderer: Renderer) -> None:
    words = [renderer.tokenizer.encode_plain(word) for word in (" pears", " plums", " bread", " cost")]
    rng = np.random.default_rng(5)
    for name in ("long-a", "long-b"):
        ids = [i for n in rng.integers(len(words), size=4000) for i in words[n]]
        run_beside(site.store.write(SessionInfo(name, 1.0), SETUP, sampled(name, [words[0][0]] * 5000, ids)))
    reopened(page, site.at("/session/long-a?compare=long-b"), ".sides.changed")
    page.keyboard.press("p")
    page.locator(".sides.changed.at").wait_for()
    nodes = "document.evaluate('//node()', document, null, 7, null).snapshotLength"
    assert page.evaluate(nodes) < 5_000
    for name in ("long-a", "long-b"):
        run_beside(site.store.delete_session(name))
