"""Rows of two sides, paired and compared, and what CI systems read of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentape.audit._id_rows import IdRow, Span, iter_rows
from tokentape.audit._tokendiff.rows import _VALUES, RowComparison, compare_rows, comparison_lines, printed, summary
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.testing import assert_same_tokens

# The parts of the SARIF 2.1.0 schema (OASIS, section 3) that a log of ours has.
_TEXT = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}
SARIF = {
    "type": "object",
    "required": ["version", "runs"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"type": "string", "format": "uri"},
        "version": {"enum": ["2.1.0"]},
        "runs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["tool"],
                "additionalProperties": False,
                "properties": {
                    "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                    "tool": {
                        "type": "object",
                        "required": ["driver"],
                        "properties": {
                            "driver": {
                                "type": "object",
                                "required": ["name"],
                                "properties": {
                                    "name": {"type": "string"},
                                    "semanticVersion": {"type": "string"},
                                    "rules": {
                                        "type": "array",
                                        "uniqueItems": True,
                                        "items": {
                                            "type": "object",
                                            "required": ["id"],
                                            "additionalProperties": False,
                                            "properties": {"id": {"type": "string"}, "shortDescription": _TEXT},
                                        },
                                    },
                                },
                                "additionalProperties": False,
                            }
                        },
                    },
                    "results": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["message"],
                            "additionalProperties": False,
                            "properties": {
                                "ruleId": {"type": "string"},
                                "ruleIndex": {"type": "integer", "minimum": 0},
                                "level": {"enum": ["none", "note", "warning", "error"]},
                                "message": _TEXT,
                                "partialFingerprints": {
                                    "type": "object",
                                    "additionalProperties": {"type": "string"},
                                },
                                "properties": {"type": "object"},
                                "locations": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "additionalProperties": False,
                                        "properties": {
                                            "physicalLocation": {
                                                "type": "object",
                                                "required": ["artifactLocation"],
                                                "properties": {
                                                    "artifactLocation": {
                                                        "type": "object",
                                                        "properties": {"uri": {"type": "string"}},
                                                    },
                                                    "region": {
                                                        "type": "object",
                                                        "properties": {"startLine": {"type": "integer", "minimum": 1}},
                                                    },
                                                },
                                            },
                                            "logicalLocations": {
                                                "type": "array",
                                                "items": {
                                                    "type": "object",
                                                    "properties": {
                                                        "name": {"type": "string"},
                                                        "kind": {"type": "string"},
                                                    },
                                                },
                                            },
                                        },
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


def written(
    rows: list[RowComparison], file_format: str, recorded: str = "b", fail_on: Literal["error", "warning"] = "warning"
) -> str:
    return "\n".join(printed(rows, file_format, recorded, 20, fail_on))


@pytest.fixture(scope="session")
def tokenizer(renderer: Renderer) -> Tokenizer:
    return renderer.tokenizer


def row(name: str, ids: list[int], line: int = 1) -> IdRow:
    return IdRow(name, np.array(ids, np.int32), (Span(0, len(ids)),), line=line)


@pytest.fixture
def rows(tokenizer: Tokenizer) -> list[RowComparison]:
    """One row is the same, one has a bell and a line break in other text, one was cut, one is not there."""
    text = tokenizer.encode_plain
    expected = [row("same", text("a")), row("other", text("one two")), row("cut", text("one two")), row("gone", [1])]
    recorded = [row("same", text("a")), row("other", text("one\x07, a:\n%")), row("cut", text("one"), line=3)]
    return list(compare_rows(expected, recorded, tokenizer))


def test_rows_are_paired_by_name(rows: list[RowComparison]) -> None:
    assert [(row.name, row.same, row.only) for row in rows] == [
        ("same", True, None),
        ("other", False, None),
        ("cut", False, None),
        ("gone", False, "expected"),
    ]


def test_single_rows_are_paired_without_a_name(tokenizer: Tokenizer) -> None:
    (row_result,) = compare_rows([row("a", [1, 2])], [row("b", [1, 2])], tokenizer)
    assert row_result.same


@given(st.permutations(range(6)), st.permutations(range(5)))
def test_order_and_repeated_names_make_no_difference(tokenizer: Tokenizer, left: list[int], right: list[int]) -> None:
    def named(order: list[int]) -> list[IdRow]:
        return [row("twice" if n < 2 else str(n), [7 if n < 2 else n]) for n in order]

    found = list(compare_rows(named(left), named(right), tokenizer))
    assert sorted(found_row.name for found_row in found) == ["2", "3", "4", "5", "twice", "twice"]
    assert [found_row.name for found_row in found if not found_row.same] == ["5"]


def with_values(name: str, mask: list[int], logprobs: list[float] | None) -> IdRow:
    values = None if logprobs is None else np.array(logprobs, np.float32)
    ids = np.arange(len(mask), dtype=np.int32)
    return IdRow(name, ids, (Span(0, len(ids)),), mask=np.array(mask, np.bool_), logprobs=values)


VALUES = with_values("s:0", [0, 1, 1, 1], [np.nan, -1.0, -2.0, -3.0])


@pytest.mark.parametrize(
    ("other", "changed"),
    [
        (with_values("s:0", [0, 1, 1, 1], [0.0, -1.0, -2.0001, -3.0]), {}),
        (with_values("s:0", [1, 0, 0, 0], [0.0, -1.0, -2.0, -3.0]), {"mask": (4, 0)}),
        (with_values("s:0", [0, 1, 1, 1], [0.0, 0.0, -1.0, -2.0]), {"logprobs": (3, 1)}),
        (with_values("s:0", [0, 1, 1, 1], [0.0, -1.0, np.nan, -3.0]), {"logprobs": (1, 2)}),
        (with_values("s:0", [0, 1, 1, 0], None), {"mask": (1, 3)}),
    ],
)
def test_masks_and_logprobs_are_compared(
    tokenizer: Tokenizer, other: IdRow, changed: dict[str, tuple[int, int]]
) -> None:
    (found,) = compare_rows([VALUES], [other], tokenizer)
    assert {name: (change.differing, change.first) for name, change in found.changed_values.items()} == changed
    assert found.same == (not changed)
    assert (found.logprobs is None) == (other.logprobs is None)
    assert ElementTree.fromstring(written([found], "junit")).get("failures") == str(int(bool(changed)))
    assert [result["ruleId"] for result in json.loads(written([found], "sarif"))["runs"][0]["results"]] == list(changed)
    assert len(written([found], "github").splitlines()) == len(changed)


def test_columns_missing_on_one_side_are_reported_and_not_compared(tokenizer: Tokenizer) -> None:
    found = list(compare_rows([VALUES], [row("s:0", [0, 1, 2, 3])], tokenizer))
    lines = list(printed(found, "text", "b", 20))
    assert lines == [
        "0 of 1 rows differ",
        *(f"not compared: {n} of 1 rows, because one side lacks them" for n in _VALUES),
    ]


def test_nan_on_both_sides_is_reported_as_not_compared(tokenizer: Tokenizer) -> None:
    side = with_values("s:0", [0, 1, 1, 1], [np.nan, np.nan, -2.0, np.nan])
    found = list(compare_rows([side], [side], tokenizer))
    assert found[0].logprobs is not None
    assert (found[0].logprobs.tokens, found[0].logprobs.unknown) == (1, 2)
    line = "not compared: logprobs of 2 tokens, because they are NaN on both sides"
    assert list(printed(found, "text", "b", 20)) == ["0 of 1 rows differ", line]
    assert json.loads(written(found, "json"))["tokens_without_logprobs"] == 2


def test_infinite_logprobs_on_both_sides_are_the_same(tokenizer: Tokenizer) -> None:
    side = with_values("s:0", [1, 1], [-np.inf, -1.0])
    (found,) = compare_rows([side], [side], tokenizer)
    assert found.same


def test_the_largest_difference_is_one_of_a_token_that_differs(tokenizer: Tokenizer) -> None:
    sides = (with_values("s:0", [1, 1], [first, second]) for first, second in ((np.nan, -1.0), (-1.0, -1.0001)))
    found = list(compare_rows(*([side] for side in sides), tokenizer))
    assert "1 of 2 tokens differ, where one side has no number" in next(printed(found, "text", "b", 20))


def test_logprobs_of_a_prompt_without_a_mask_are_not_compared(tokenizer: Tokenizer, tmp_path: Path) -> None:
    split = {"prompt_ids": [5, 6], "completion_ids": [7], "logprobs": [-1.0]}
    whole = {"input_ids": [5, 6, 7], "logprobs": [0.0, 0.0, -1.0]}
    for name, value in (("a", split), ("b", whole)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(value))
    (found,) = compare_rows(iter_rows(tmp_path / "a.jsonl"), iter_rows(tmp_path / "b.jsonl"), tokenizer)
    assert found.same


@pytest.mark.parametrize(
    ("expected", "recorded", "same"),
    [
        (["s", "t"], ["s:0", "t:3"], {"s", "t"}),
        (["s:0", "t:3"], ["s", "t"], {"s:0", "t:3"}),
        (["s1", "t"], ["s1:0", "s10:0", "t:0"], {"s1", "t"}),
        (["s", "t"], ["s:0", "s:2", "t:0"], {"t"}),
        (["s", "s", "t"], ["s:0", "t:0"], {"t"}),
        (["abc", "x"], ["abcdef", "x"], {"abc", "x"}),
    ],
)
def test_a_unique_prefix_is_a_name(
    tokenizer: Tokenizer, expected: list[str], recorded: list[str], same: set[str]
) -> None:
    found = compare_rows([row(name, [1]) for name in expected], [row(name, [1]) for name in recorded], tokenizer)
    assert {result.name for result in found if result.same} == same


def test_sarif_is_of_its_schema(rows: list[RowComparison]) -> None:
    log = json.loads(written(rows, "sarif", "runs/b.jsonl"))
    jsonschema.validate(log, SARIF)
    run: dict[str, Any] = log["runs"][0]
    results = run["results"]
    assert [result["ruleId"] for result in results] == ["text", "cut", "absent"]
    assert all(run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] for result in results)
    assert [result["level"] for result in results] == ["error", "warning", "error"]
    assert results[1]["locations"][0]["physicalLocation"]["region"]["startLine"] == 3
    assert len({result["partialFingerprints"]["tokens/v1"] for result in results}) == 3
    assert "\x07" not in results[0]["message"]["text"]


def test_junit_failures_match_those_of_the_command(rows: list[RowComparison]) -> None:
    suite = ElementTree.fromstring(written(rows, "junit"))
    assert (suite.get("tests"), suite.get("failures")) == ("4", "3")
    suite = ElementTree.fromstring(written(rows, "junit", fail_on="error"))
    assert (suite.tag, suite.get("tests"), suite.get("failures")) == ("testsuite", "4", "2")
    cases = {case.get("name"): case for case in suite}
    assert cases["same"].find("failure") is None
    failure = cases["other"].find("failure")
    assert failure is not None
    assert "text" in (failure.text or "")
    assert cases["cut"].find("failure") is None
    assert cases["cut"].find("system-out") is not None
    assert cases["gone"].find("failure") is not None


def test_an_annotation_is_one_line_with_its_commas_escaped(rows: list[RowComparison]) -> None:
    lines = written(rows, "github", "runs/a,b.jsonl").split("\n")
    assert len(lines) == 3
    assert all("\n" not in line for line in lines)
    assert lines[0].startswith("::error file=runs/a%2Cb.jsonl,line=1,title=other%3A text at token ")
    assert lines[1].startswith("::warning file=runs/a%2Cb.jsonl,line=3,")
    assert "%25" in lines[0]


def test_long_lists_of_differences_are_cut(tokenizer: Tokenizer) -> None:
    pieces = ["<|im_start|>a<|im_end|>", "<|im_start|>b<|im_end|>"]
    sides = [tokenizer.encode_plain("".join(order)) for order in (pieces * 5, ["<|im_start|>a<|im_end|>"] * 10)]
    (row_result,) = compare_rows([row("a", sides[0])], [row("a", sides[1])], tokenizer)
    assert row_result.comparison is not None
    lines = list(comparison_lines(row_result.comparison, most=2))
    assert len(lines) == 3
    assert lines[-1] == f"and {len(row_result.comparison.differences) - 2} more"


def test_the_helper_passes_the_same_ids(tokenizer: Tokenizer, renderer: Renderer) -> None:
    assert_same_tokens([1, 2], np.array([1, 2]), tokenizer)


def test_helper_shows_where_ids_differ(tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode_plain("It cost 12.")
    recorded = [token_id for piece in ("It", " co", "st", " 12.") for token_id in tokenizer.encode_plain(piece)]
    with pytest.raises(AssertionError) as caught:
        assert_same_tokens(expected, recorded, tokenizer)
    assert "1 difference, 1 of them errors (ids 1)" in str(caught.value)
    assert '" cost" [' in str(caught.value)
    assert_same_tokens(expected, recorded, tokenizer, allow=["ids"])


def test_the_helper_takes_a_model_folder(model_dir: Any) -> None:
    with pytest.raises(AssertionError, match="cut"):
        assert_same_tokens([1, 2], [1], str(model_dir))


def test_a_summary_names_the_kinds(rows: list[RowComparison]) -> None:
    found = {row.name: row.comparison for row in rows}
    assert found["cut"] is not None
    assert summary(found["cut"]).startswith("1 difference, 0 of them errors (cut 1); expected ")
