"""The drift meter on completions whose drift is known, and against a slow obvious meter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.conftest import load_tokenizer
from tokentape.audit._drift import meter as drift
from tokentape.audit._drift.meter import measure_drift
from tokentape.audit._drift.report import Cost, DriftReport, drift_layout
from tokentape.audit._id_rows import IdRow, Span
from tokentape.audit._statistics import Rate
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest
from tokentape.types import TokenIds


@pytest.fixture(scope="session")
def tokenizer(renderer: Renderer) -> Tokenizer:
    return renderer.tokenizer


def split(tokenizer: Tokenizer, text: str) -> list[int]:
    """Pieces between dots, encoded one by one."""
    return [token_id for piece in text.split("·") for token_id in tokenizer.encode_plain(piece)]


def row(name: str, *parts: list[int], sampled: tuple[int, ...] = (0,), **labels: str) -> IdRow:
    """A row of parts, of which those at the positions `sampled` are completions."""
    ids = np.array([token_id for part in parts for token_id in part], np.int32)
    ends = np.cumsum([len(part) for part in parts]).tolist()
    spans = tuple(Span(ends[n] - len(parts[n]), ends[n], labels) for n in sampled)
    return IdRow(name, ids, spans)


def counted(rate: Rate) -> tuple[int, int]:
    return rate.changed, rate.total


def test_canonical_completions_do_not_drift(tokenizer: Tokenizer) -> None:
    report = measure_drift([row("a", split(tokenizer, "They cost 12.<END>"))], tokenizer)
    assert (report.completions.changed, report.tokens.changed, report.artifacts) == (0, 0, ())


def test_a_split_word_is_counted_classed_and_shown(tokenizer: Tokenizer) -> None:
    ids = split(tokenizer, "They· co·st· 12.")
    report = measure_drift([row("a", split(tokenizer, "They cost 12.")), row("b", ids)], tokenizer)
    changed = len(split(tokenizer, " co·st"))
    assert counted(report.completions) == (1, 2)
    assert counted(report.tokens) == (changed, len(ids) + len(split(tokenizer, "They cost 12.")))
    (example,) = report.examples
    assert (example.row, example.artifact) == ("b", "intra-word")
    assert list(example.sampled) == split(tokenizer, " co·st")
    assert list(example.retokenized) == split(tokenizer, " cost")
    assert (report.span_tokens.median, report.resync_bytes.median) == (changed, 5)
    assert (report.same_count, report.more_tokens, report.fewer_tokens) == (0, 0, 1)


def test_only_sampled_tokens_are_measured(tokenizer: Tokenizer) -> None:
    user, answer = split(tokenizer, "<|im_start|>wh·at<|im_end|>"), split(tokenizer, "12<|im_end|>")
    report = measure_drift([row("a", user, answer, sampled=(1,))], tokenizer)
    assert counted(report.tokens) == (0, len(answer))


def test_a_completion_that_begins_within_a_token_of_the_joined_text_has_no_seam(tokenizer: Tokenizer) -> None:
    base = row("a", split(tokenizer, "They co"), split(tokenizer, "st 12."), sampled=(1,))
    after_control = row("b", split(tokenizer, "They<|im_end|>"), split(tokenizer, "st 12."), sampled=(1,))
    held = row("c", split(tokenizer, "They"), split(tokenizer, " cost 12."), sampled=(1,))
    report = measure_drift([base, after_control, held], tokenizer)
    assert (counted(report.seams), report.tokens.changed) == ((1, 2), 0)


def test_half_a_character_is_unknown_at_an_end_and_drift_in_the_middle() -> None:
    tokenizer = load_tokenizer("qwen3")
    by_bytes = {tokenizer.token_bytes(i): i for i in range(256)}
    halves = [by_bytes[byte] for byte in (b"\xf0", b"\x9f")]
    text = tokenizer.encode_plain("ok")
    cut = measure_drift([row("a", [*text, *halves])], tokenizer)
    assert (cut.unknown_tokens, counted(cut.tokens), cut.completions.changed) == (2, (0, len(text)), 0)
    within = measure_drift([row("a", [*text, *halves, *text])], tokenizer)
    assert (within.unknown_tokens, within.other_text) == (0, 1)
    assert {artifact.name for artifact in within.artifacts} == {"partial-utf8"}


@pytest.mark.parametrize("text", ["Hello there", " Hello there", "      indented"])
def test_space_added_by_the_tokenizer_is_not_drift(text: str) -> None:
    tokenizer = load_tokenizer("mistral_v3_spm")
    at_start, after_control = tokenizer.encode_plain(text), tokenizer.encode_after_control(text).ids
    report = measure_drift([row("a", at_start), row("b", after_control)], tokenizer)
    assert counted(report.completions) == (0, 2)


def test_different_normal_form_is_reported() -> None:
    tokenizer = load_tokenizer("qwen3")
    ids = tokenizer.encode_plain("caf") + tokenizer.encode_plain("e") + split_bytes(tokenizer, "\u0301")
    report = measure_drift([row("a", ids)], tokenizer)
    assert (report.other_text, [artifact.name for artifact in report.artifacts]) == (1, ["normal-form"])


def split_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    by_bytes = {tokenizer.token_bytes(i): i for i in range(256)}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


def test_regions_scripts_and_labels_are_strata(tokenizer: Tokenizer) -> None:
    text = "<think>\nhm· co·st\n</think>\n\nSo ```x· = 1``` then<tool_call>{}</tool_call>"
    report = measure_drift([row("a", split(tokenizer, text), turn="2", temperature="1")], tokenizer)
    found = {(stratum.dimension, stratum.value): stratum for stratum in report.strata}
    assert {value for dimension, value in found if dimension == "region"} == {"prose", "reasoning", "code", "tool call"}
    assert found["region", "reasoning"].tokens.changed == len(split(tokenizer, " co·st"))
    assert found["turn", "2"].completions is not None
    assert counted(found["temperature", "1"].tokens) == counted(report.tokens)
    for dimension in ("region", "script"):
        parts = [stratum.tokens for (name, _), stratum in found.items() if name == dimension]
        assert (sum(part.changed for part in parts), sum(part.total for part in parts)) == counted(report.tokens)


def test_values_beyond_the_limit_are_counted_together(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "VALUES", 2)
    rows = [row(str(n), split(tokenizer, "ab"), weights=f"step-{n}") for n in range(5)]
    found = {
        stratum.value: stratum.completions
        for stratum in measure_drift(rows, tokenizer).strata
        if stratum.dimension == "weights"
    }
    assert {value: completions.total for value, completions in found.items() if completions} == {
        "step-0": 1,
        "step-1": 1,
        "other": 3,
    }


def test_a_drifted_turn_costs_a_row_where_another_follows(tokenizer: Tokenizer) -> None:
    drifted, tool = split(tokenizer, " co·st<|im_end|>"), split(tokenizer, "<|im_start|>4<|im_end|>")
    report = measure_drift([row("a", drifted, tool, drifted, sampled=(0, 2))], tokenizer)
    total = 2 * len(drifted) + len(tool)
    assert report.cost == Cost(1, 2, total, total + len(drifted), 2 * len(split(tokenizer, " co·st")))


def test_model_gives_the_change_of_logprob(tokenizer: Tokenizer) -> None:
    def forward(ids: TokenIds) -> np.ndarray:
        return np.concatenate([[np.nan], np.full(len(ids) - 1, -1.0)]).astype(np.float32)

    context, drifted = split(tokenizer, "Now<|im_end|>"), split(tokenizer, " co·st")
    rows = [row(name, context, drifted, sampled=(1,)) for name in "ab"]
    found = measure_drift(rows, tokenizer, forward=forward, forward_limit=1).logprobs
    assert found is not None
    assert (found.completions, found.mean) == (1, len(split(tokenizer, " cost")) - len(drifted))


def test_ids_of_another_model_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="outside of the tokenizer"):
        measure_drift([row("a", [tokenizer.vocab_size])], tokenizer)


def test_batches_do_not_change_the_sums(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(str(n), split(tokenizer, "They· co·st· 12." if n % 3 else "no drift")) for n in range(20)]
    whole = measure_drift(rows, tokenizer)
    monkeypatch.setattr(drift, "BATCH_TOKENS", 1)
    assert sums(measure_drift(rows, tokenizer)) == sums(whole)


def sums(report: DriftReport) -> DriftReport:
    """The report without its randomly drawn parts."""
    rate = replace(report.tokens, low=0, high=0)
    return replace(report, tokens=rate, strata=tuple(replace(stratum, tokens=rate) for stratum in report.strata))


@given(st.lists(st.lists(st.integers(4, 3999), max_size=12), max_size=6))
def test_meter_agrees_with_a_slow_meter(tokenizer: Tokenizer, completions: list[list[int]]) -> None:
    rows = [row(str(n), ids) for n, ids in enumerate(completions)]
    report = measure_drift(rows, tokenizer)
    expected = changed = tokens = 0
    for ids in completions:
        text = b"".join(map(tokenizer.token_bytes, ids))
        try:
            again = tokenizer.encode_plain(text.decode())
        except UnicodeDecodeError:
            return  # unknown tokens have their own tests
        if b"".join(map(tokenizer.token_bytes, again)) != text:
            return
        tokens += len(ids)
        expected += ids != again
        placed = set(places(tokenizer, again))
        changed += sum(place not in placed for place in places(tokenizer, ids))
    assert (report.completions.changed, report.tokens.changed, report.tokens.total) == (expected, changed, tokens)


def places(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[int, int]]:
    return [(sum(len(tokenizer.token_bytes(token_id)) for token_id in ids[: n + 1]), ids[n]) for n in range(len(ids))]


def test_page_shows_the_numbers_of_the_report(tokenizer: Tokenizer) -> None:
    report = measure_drift([row("<b>", split(tokenizer, "They· co·st"), turn="1")], tokenizer)
    page = drift_layout(report, "runs/x").html()
    assert "intra-word" in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
