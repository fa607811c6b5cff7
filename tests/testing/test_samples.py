"""The conformance kit on handmade rows of the golden turns: its findings, and their absence for correct rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import PATIENCE
from tokentape.errors import InvalidRequest
from tokentape.testing import _rows as rows_module
from tokentape.testing import samples as kit
from tokentape.testing._planted import ERRORS, Planted
from tokentape.testing._rows import place
from tokentape.testing.golden import GOLDEN, PAD, Golden, Token
from tokentape.testing.samples import Row, check_samples, findings, main
from tokentape.training._collate import group_advantages
from tokentape.training._samples import Sample, assemble

BY_NAME = {golden.name: golden for golden in GOLDEN}


def right(golden: Golden, by: str = "token", pad: int = 0) -> list[Row]:
    """Return a row per path with every field. The first path trains the tokens of shared turns."""
    rows = []
    seen: set[Token] = set()
    rewards: dict[str, list[float]] = {}
    for session in golden.sessions:
        if session.reward is not None:
            rewards.setdefault(session.group, []).append(session.reward)
    for session in golden.sessions:
        if session.reward is None:
            continue
        advantage = 0.7 * (session.reward - sum(rewards[session.group]) / len(rewards[session.group]))
        unit = 1.0 if by == "token" else 1 / len(session.tokens())
        for path in session.paths():
            row: dict[str, list[Any]] = {name: [] for name in ("token_ids", "weights", "logprobs", "weight_versions")}
            for cell in [*[PAD] * pad, *path, *[PAD] * pad]:
                sampled = isinstance(cell, Token)
                row["token_ids"].append(cell.id if sampled else cell)
                row["weights"].append(unit if sampled and cell not in seen else 0.0)
                row["logprobs"].append(cell.logprob() if sampled else 0.0)
                row["weight_versions"].append(cell.version if sampled else "")
            sampled_cells = [cell for cell in path if isinstance(cell, Token)]
            seen.update(sampled_cells)
            rows.append(
                Row(
                    **row,
                    advantages=[advantage] * len(row["token_ids"]),
                    reward=session.reward,
                    truncated=session.turns[sampled_cells[-1].turn].finish == "length",
                    temperature=sampled_cells[0].temperature,
                    position_ids=[max(n - pad, 0) for n in range(len(row["token_ids"]))],
                )
            )
    return rows


@pytest.mark.parametrize("pad", [0, 2])
@pytest.mark.parametrize("by", ["token", "session"])
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_correct_rows_have_no_findings(golden: Golden, by: str, pad: int) -> None:
    assert findings(golden, right(golden, by, pad)) == []


FINDING_KINDS = {
    "mask shifted left": {"mask shifted", "last token not trained"},
    "mask shifted right": {"mask shifted", "not trained"},
    "mask inverted": {"mask inverted", "not trained"},
    "prompt trained": {"prompt trained"},
    "padding trained": {"padding trained"},
    "last token dropped": {"last token not trained"},
    "end of turn taken for padding": {"last token not trained"},
    "ids encoded again": {"ids not as recorded", "not trained"},
    "fork counted twice": {"trained twice"},
    "siblings counted as sessions": {"siblings counted as sessions"},
    "group's mean over samples": {"siblings counted as sessions"},
    "logprobs shifted by one": {"logprobs shifted"},
    "logprobs of prompt positions": {"logprobs shifted"},
    "logprobs of another temperature": {"logprobs of another temperature"},
    "logprobs left out": {"logprobs missing"},
    "logprobs clamped": {"logprobs clamped"},
    "float16 logprobs": {"logprobs rounded"},
    "another temperature named": {"temperature differs"},
    "rewards broadcast twice": {"reward counted several times"},
    "samples reordered, rewards not": {"reward of another session"},
    "positions shifted by one": {"positions differ"},
}


@pytest.mark.parametrize("name", FINDING_KINDS)
def test_planted_error_in_a_forked_session_has_only_its_finding(name: str) -> None:
    golden = BY_NAME["forked"]
    (error,) = [candidate for candidate in ERRORS if candidate.name == name]
    placed, _ = place(golden, right(golden))
    assert {finding.kind for finding in findings(golden, error.plant(golden, placed))} == FINDING_KINDS[name]


@pytest.mark.parametrize(
    ("name", "golden", "kind"),
    [
        ("truncation hidden", "truncated at the end", "truncation hidden"),
        ("one weight version for a row", "two weight versions", "version of other weights"),
    ],
)
def test_error_that_needs_a_special_session_has_its_finding(name: str, golden: str, kind: str) -> None:
    (error,) = [candidate for candidate in ERRORS if candidate.name == name]
    placed, _ = place(BY_NAME[golden], right(BY_NAME[golden]))
    assert {finding.kind for finding in findings(BY_NAME[golden], error.plant(BY_NAME[golden], placed))} == {kind}


def test_reward_for_a_session_without_reward_is_reported() -> None:
    golden = BY_NAME["no reward"]
    (path,) = golden.sessions[1].paths()
    ids = [cell.id if isinstance(cell, Token) else cell for cell in path]
    on = [isinstance(cell, Token) for cell in path]
    logprobs = [cell.logprob() if isinstance(cell, Token) else 0.0 for cell in path]
    assert findings(golden, [*right(golden), Row(ids, on, logprobs)]) == []
    for extra in ({"reward": 0.0}, {"advantages": [0.0] * len(ids)}):
        assert {finding.kind for finding in findings(golden, [*right(golden), Row(ids, on, logprobs, **extra)])} == {
            "reward invented"
        }


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_every_planted_error_that_changes_a_row_is_reported(error: Planted) -> None:
    changed = 0
    for golden in GOLDEN:
        rows = right(golden, pad=1)
        if golden.name == "no reward":
            (path,) = golden.sessions[1].paths()
            ids = [cell.id if isinstance(cell, Token) else cell for cell in path]
            rows.append(Row(ids, [isinstance(cell, Token) for cell in path]))
            rows = [replace(row, logprobs=None, advantages=None) for row in rows]
        placed, _ = place(golden, rows)
        wrong = error.plant(golden, placed)
        if any(kit._differ(row, placed_row.row) for row, placed_row in zip(wrong, placed, strict=True)):
            changed += 1
            assert error.kind in {finding.kind for finding in findings(golden, wrong)}, golden.name
    assert changed


RIGHT = {golden.name: right(golden, pad=1) for golden in GOLDEN}


@st.composite
def single_change(draw: st.DrawFn) -> tuple[Golden, list[Row]]:
    """Draw correct rows with a single change: a number that a loss reads, or a row truncated, missing or doubled."""
    golden = draw(st.sampled_from(GOLDEN))
    rows = list(RIGHT[golden.name])
    n = draw(st.integers(0, len(rows) - 1))
    row = rows[n]
    on = np.flatnonzero(row.weights).tolist()
    at = draw(st.integers(0, len(row.weights) - 1))
    trained = draw(st.sampled_from(on))

    def with_changed(name: str, position: int, value: Any) -> Row:
        return replace(row, **{name: [*getattr(row, name)[:position], value, *getattr(row, name)[position + 1 :]]})

    changes: dict[str, Any] = {
        "id": lambda: with_changed("token_ids", at, (row.token_ids[at] + draw(st.integers(1, 127))) % 128),
        "weight": lambda: with_changed("weights", at, float(not row.weights[at])),
        "some weight": lambda: with_changed("weights", trained, draw(st.sampled_from([0.5, 1.01, 2.0, -1.0]))),
        "logprob": lambda: with_changed("logprobs", trained, row.logprobs[trained] + draw(st.floats(1e-4, 9))),
        "no logprob": lambda: with_changed("logprobs", trained, float("nan")),
        "advantage": lambda: with_changed("advantages", trained, row.advantages[trained] * draw(st.floats(1.01, 9))),
        "no advantage": lambda: with_changed("advantages", trained, float("nan")),
        "version": lambda: with_changed("weight_versions", trained, "9"),
        "reward": lambda: replace(row, reward=(row.reward or 0.0) + draw(st.floats(0.01, 2))),
        "truncated": lambda: replace(row, truncated=not row.truncated),
        "temperature": lambda: replace(row, temperature=draw(st.floats(0.1, 0.9))),
    }
    kind = draw(st.sampled_from([*changes, "gone", "twice", "cut"]))
    if kind == "gone":
        del rows[n]
    elif kind == "twice":
        rows.append(row)
    elif kind == "cut":
        end = draw(st.integers(on[0] + 1, on[-1]))
        lists = {name: getattr(row, name)[:end] for name in ("token_ids", "weights", "logprobs", "advantages")}
        rows[n] = replace(row, **lists, weight_versions=row.weight_versions[:end])
    else:
        rows[n] = changes[kind]()
    return golden, rows


@given(single_change())
def test_every_single_change_of_loss_inputs_is_reported(changed: tuple[Golden, list[Row]]) -> None:
    assert findings(*changed)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"token_ids": [50, 10]}, "lengths differ"),
        ({"truncated": True}, "truncation claimed"),
        ({"advantages": np.zeros(30)}, "advantages differ"),
        ({"reward": 0.123}, "reward differs"),
        ({"reward": None}, "reward missing"),
        ({"logprobs": np.full(30, -0.1)}, "logprobs differ"),
        ({"weights": np.zeros(30)}, "not trained"),
    ],
)
def test_errors_that_are_not_planted_have_kinds(change: dict[str, Any], kind: str) -> None:
    golden = BY_NAME["exact"]
    first, *others = right(golden)
    size = len(first.token_ids)
    cut = {name: value[:size] if isinstance(value, np.ndarray) else value for name, value in change.items()}
    assert kind in {finding.kind for finding in findings(golden, [replace(first, **cut), *others])}


def test_row_with_tokens_of_an_aborted_turn_is_not_as_recorded() -> None:
    golden = BY_NAME["aborted"]
    turns = golden.sessions[0].turns
    ids = [
        *turns[0].added,
        *(token.id for token in turns[0].sampled),
        *turns[1].added,
        *(token.id for token in turns[1].sampled),
    ]
    row = Row(ids, [0] * (len(ids) - 1) + [1])
    assert [finding.kind for finding in findings(golden, [*right(golden), row])] == ["ids not as recorded"]


def test_trainer_padding_is_reported_as_padding() -> None:
    golden = BY_NAME["exact"]
    first, *others = right(golden)
    (finding, *_) = findings(golden, [Row([*first.token_ids, 0, 0], [*first.weights, 0, 0]), *others])
    advice = "only id 0; if that pads, use golden.PAD"
    assert finding.text.endswith(f"after the first {len(first.token_ids)} tokens, {advice}")


def test_a_weight_that_is_not_a_number_is_not_equal() -> None:
    golden = BY_NAME["exact"]
    rows = right(golden)
    rows[0].weights[np.flatnonzero(rows[0].weights)[1]] = np.nan
    assert {finding.kind for finding in findings(golden, rows)} == {"weights out of proportion"}


@pytest.mark.parametrize("of_row", [False, True])
def test_weight_versions_may_be_numbers(of_row: bool) -> None:
    golden = BY_NAME["two weight versions"]
    rows = [replace(row, weight_versions=[int(name or -1) for name in row.weight_versions]) for row in right(golden)]
    if of_row:
        rows = [replace(row, weight_versions={*row.weight_versions} - {-1}) for row in rows]
    assert findings(golden, rows) == []


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_a_negated_or_cleared_reward_is_not_counted_several_times(factor: float) -> None:
    golden = BY_NAME["exact"]
    rows = [replace(row, reward=factor * (row.reward or 0.0)) for row in right(golden)]
    assert {finding.kind for finding in findings(golden, rows)} == {"reward differs"}


def test_negative_weights_are_not_equal() -> None:
    golden = BY_NAME["exact"]
    rows = [replace(row, weights=-np.array(row.weights)) for row in right(golden)]
    assert {finding.kind for finding in findings(golden, rows)} == {"weights out of proportion"}


def test_weights_that_differ_within_a_row_are_out_of_proportion() -> None:
    golden = BY_NAME["exact"]
    first, *others = right(golden)
    uneven = np.array(first.weights) * np.arange(1, len(first.weights) + 1)
    assert {finding.kind for finding in findings(golden, [replace(first, weights=uneven), *others])} == {
        "weights out of proportion"
    }


def of_samples(samples: Sequence[Sample]) -> Iterator[Row]:
    for sample in group_advantages(samples):
        yield Row(
            sample.token_ids, sample.loss_mask, sample.logprobs, sample.columns["advantages"], reward=sample.reward
        )


def test_samples_that_train_shared_turns_in_each_branch_do_not_pass() -> None:
    def each_branch(paths: Sequence[Any]) -> list[Sample]:
        made = assemble(paths, group="group").samples
        return [replace(sample, loss_mask=sample.provenance == 1) for sample in made]

    report = check_samples(of_samples, samples=each_branch)
    assert {finding.kind for finding in report.goldens["forked"]} == {"trained twice"}
    assert report.goldens["exact"] == []


def test_raising_data_path_fails_but_an_allowed_refusal_does_not() -> None:
    def refusing(samples: Sequence[Sample]) -> list[Row]:
        raise InvalidRequest("no such thing")

    report = check_samples(refusing)
    assert not report.ok
    assert [finding.kind for finding in report.goldens["exact"]] == ["failed"]
    assert report.goldens["no reward"] == []
    assert "refused: no such thing" in str(report)


def test_rows_that_train_nothing_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def masked_besides(samples: Sequence[Sample]) -> list[Row]:
        rows = list(of_samples(samples))
        return [replace(rows[0], weights=np.zeros(len(rows[0].token_ids))), *rows]

    monkeypatch.setattr(kit, "GOLDEN", GOLDEN[:2])
    assert check_samples(masked_besides).ok


def test_a_data_path_that_trains_nothing_fails() -> None:
    report = check_samples(lambda samples: [Row(sample.token_ids, 0 * sample.token_ids) for sample in samples])
    assert all(
        [finding.kind for finding in golden_findings] == ["not trained"] for golden_findings in report.goldens.values()
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "broken",
    [
        lambda samples: [],
        lambda samples: list(of_samples(samples))[-1:],
        lambda samples: [Row([1, 2, 3], [0, 1, 1], [0, -1, -1]), *of_samples(samples)],
        lambda samples: [Row([], [], []), *of_samples(samples)],
        lambda samples: [replace(row, logprobs=[float("nan")] * len(row.token_ids)) for row in of_samples(samples)],
        lambda samples: [replace(row, advantages=0 * row.token_ids) for row in of_samples(samples)],
        lambda samples: [replace(row, token_ids=row.token_ids[:-1]) for row in of_samples(samples)],
    ],
)
def test_invalid_results_of_a_data_path_fail(broken: Any) -> None:
    report = check_samples(broken)
    assert all(golden_findings for name, golden_findings in report.goldens.items() if name not in report.refused)
    assert str(report)


def test_exception_that_is_not_a_refusal_fails_everywhere() -> None:
    def broken(samples: Sequence[Sample]) -> list[Row]:
        raise ValueError("sizes do not match")

    assert all(
        [finding.kind for finding in golden_findings] == ["failed"]
        for golden_findings in check_samples(broken).goldens.values()
    )


def test_unnoticed_error_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "GOLDEN", GOLDEN[:1])
    assert check_samples(of_samples).ok
    monkeypatch.setattr(rows_module, "_mask", lambda mask: iter(()))
    report = check_samples(of_samples)
    assert not report.ok
    assert not any(report.goldens.values())
    assert report.planted["prompt trained"] == {"exact": False}
    assert "caught in 0 of 1, unnoticed in: exact" in str(report)


def test_report_lists_unchecked_parts() -> None:
    assert check_samples(of_samples).not_given == ("truncated", "weight_versions", "temperature", "position_ids")


def test_command_prints_a_table_and_sets_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{__name__}:of_samples"]) == 1
    assert "logprobs of 1, but was sampled at 1.4" in capsys.readouterr().out
    monkeypatch.setattr(kit, "GOLDEN", GOLDEN[:2])
    assert main([f"{__name__}:of_samples"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [f"{'exact':34}held", f"{'forked':34}held"]
    assert main(["no_colon"]) == 2


def test_the_module_runs_as_a_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from tokentape.testing.samples import Row\n"
        "def rows(samples):\n"
        "    return [Row(one.token_ids, one.loss_mask, one.logprobs) for one in samples]\n"
    )
    command = [sys.executable, "-m", "tokentape.testing.samples", "mine:rows"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert ran.stderr == ""
    assert f"{'exact':34}held" in ran.stdout
    assert ran.returncode == 1


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("nomod:rows", "there is no module 'nomod'; run this where 'nomod' can be imported"),
        ("tests.nomod:rows", "there is no module 'tests.nomod'; run"),
        (f"{__name__}:nope", "names nothing; expected MODULE:FUNCTION"),
        (f"{__name__}:BY_NAME", "names dict; expected MODULE:FUNCTION"),
        (":rows", "names nothing; expected MODULE:FUNCTION"),
    ],
)
def test_a_wrong_name_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str], argument: str, message: str) -> None:
    assert main([argument]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("with_reward", [True, False])
@pytest.mark.parametrize("name", ["exact", "forked", "groups of unequal branches"])
def test_advantages_of_the_wrong_sign_are_named(name: str, with_reward: bool) -> None:
    """Without rewards, two sessions with exchanged advantages look alike."""
    golden = BY_NAME[name]
    rows = [
        replace(row, advantages=[-value for value in row.advantages], reward=row.reward if with_reward else None)
        for row in right(golden)
    ]
    groups = {session.group: [s for s in golden.sessions if s.group == session.group] for session in golden.sessions}
    expected = {
        "advantages of the wrong sign" if with_reward or len(sessions) > 2 else "reward of another session"
        for sessions in groups.values()
    }
    assert {finding.kind for finding in findings(golden, rows)} == expected
