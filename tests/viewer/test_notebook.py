"""Trajectories and certificates as the last value of a notebook's cell."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.records import make_chain, make_turn
from tests.viewer.conftest import HOSTILE
from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.chat._certificate import Certificate, Continuation, ParseCheck
from tokentape.chat._renderer import Renderer
from tokentape.types import SessionInfo, Trajectory
from tokentape.viewer._notebook import shown_with


class Page(HTMLParser):
    """Collects every element with its attributes, and all text outside of styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._style = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._style else data


def trajectory_of(renderer: Renderer, prompt: str, completion: str) -> Trajectory:
    added, sampled = (renderer.tokenizer.encode_marked(text).ids for text in (prompt, completion))
    turn = make_turn(
        "s",
        0,
        added_ids=np.array(added, np.int32),
        added_provenance=np.full(len(added), 4, np.uint8),
        completion_ids=np.array(sampled, np.int32),
        logprobs=np.linspace(-9, 0, len(sampled), dtype=np.float32),
    )
    (trajectory,) = trajectories(Session(SessionInfo("<b>s</b>", 1.0), [turn]))
    return trajectory


CERTIFICATE = Certificate(
    fingerprint="f" * 64,
    template_kwargs={},
    versions={},
    overrides=None,
    continuations=(
        Continuation("user", "local", "yes", 9, ""),
        Continuation("tool", "fork", "no", 9, "<i>rewrites</i>"),
    ),
    parsing=(ParseCheck("content", True, ""), ParseCheck("call", False, "no closing tag"), ParseCheck("x", None, "")),
    call_style="Hermes JSON",
    reasoning=("<think>", "</think>"),
    reasoning_opened_by_prompt=False,
    generation_prompt="<|im_start|>assistant\n",
    stop_tokens=("<|im_end|>",),
    date_dependent=False,
    dropped=("<script>old thinking</script>",),
    injection_safe=True,
)


def test_a_trajectory_alone_is_a_table() -> None:
    (trajectory,) = trajectories(Session(SessionInfo("s", 1.0), make_chain("s", 2)))
    page = Page(trajectory._repr_html_())
    assert [tag for tag, _ in page.elements].count("tr") == 7
    for shown in (
        trajectory.verdict,
        str(len(trajectory.token_ids)),
        str(int(trajectory.loss_mask.sum())),
        "tokentape.viewer.shown_with(trajectory, tokenizer)",
    ):
        assert shown in page.text


def test_with_a_tokenizer_it_shows_text_with_whole_characters(renderer: Renderer) -> None:
    page = Page(shown_with(trajectory_of(renderer, "漢字 🫠", "one\ntwo\n"), renderer.tokenizer)._repr_html_())
    assert "漢字 🫠" in page.text
    assert "one↵\ntwo↵" in page.text
    assert "shown_with" not in page.text


@pytest.mark.parametrize("html", ["text", "trajectory", "certificate"])
def test_foreign_text_is_escaped(renderer: Renderer, html: str) -> None:
    trajectory = replace(trajectory_of(renderer, HOSTILE, HOSTILE), session_id=HOSTILE, verdict=HOSTILE)
    shown = {
        "text": shown_with(trajectory, renderer.tokenizer),
        "trajectory": trajectory,
        "certificate": replace(CERTIFICATE, generation_prompt=HOSTILE),
    }
    written = shown[html]._repr_html_()  # type: ignore[attr-defined]
    page = Page(written)
    assert {tag for tag, _ in page.elements} <= {"style", "div", "span", "h4", "table", "caption", "tr", "td"}
    assert all(set(attributes) <= {"class", "title"} for _, attributes in page.elements)
    assert not re.search("[\u202e\u2066\u200b\x07\x1b]", written)


def test_nothing_is_loaded_or_run(renderer: Renderer) -> None:
    written = shown_with(trajectory_of(renderer, "a", "b"), renderer.tokenizer)._repr_html_()
    assert not re.search(r"<script|https?:|url\(|@import|\son\w+=", written)


def test_long_trajectory_is_shortened_in_the_middle(renderer: Renderer) -> None:
    trajectory = trajectory_of(renderer, "word " * 5000, "end")
    written = shown_with(trajectory, renderer.tokenizer)._repr_html_()
    page = Page(written)
    assert sum(tag == "span" for tag, _ in page.elements) == 1600
    assert f"⋯ {len(trajectory.token_ids) - 1600:,} tokens ⋯" in page.text
    assert page.text.rstrip().endswith("end")
    assert len(written) < 200_000


def test_certificate_shows_passed_and_failed_properties() -> None:
    page = Page(CERTIFICATE._repr_html_())
    for word in (
        "Hermes JSON",
        "local",
        "rewrites",
        "FAILS",
        "no closing tag",
        "not tried",
        "old thinking",
        "<|im_end|>",
    ):
        assert word in page.text
    assert "NO" in Page(replace(CERTIFICATE, injection_safe=False)._repr_html_()).text
