from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.cli.conftest import Record, Run
from tests.records import SETUP, make_chain, make_turn
from tests.viewer.runs import corrupt
from tokentape.chat._renderer import Renderer
from tokentape.store import SqliteStore
from tokentape.store._served_model import ServedModel, write_served_model
from tokentape.types import Provenance, SessionInfo, TokenDistribution

HELLO = [(Provenance.TEMPLATE, "<|im_start|>user\n"), (Provenance.USER, "hello"), (Provenance.SAMPLED, "hi<|im_end|>")]


def test_every_run_names_its_writer(run: Run, record: Record) -> None:
    done = run("show", record(HELLO), "s")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[4:] == [
        " template | <|im_start|>user↵",
        "     user | hello",
        "  sampled | hi<|im_end|>",
    ]


def test_turn_with_calls_shows_the_finish_reason_of_its_client(run: Run, tmp_path: Path) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}]
    turns = [
        (parent := make_turn("s", 0, reply={"role": "assistant", "content": None, "tool_calls": calls})),
        make_turn("s", 1, parent, reply=parent.reply, finish_reason="length"),
    ]
    with SqliteStore.open(tmp_path / "data") as store:
        asyncio.run(store.write(SessionInfo("s", 1.0), SETUP, *turns))
    lines = run("show", tmp_path / "data", "s").stdout.splitlines()
    first, second = (line.split(" | ")[2] for line in lines if line.startswith("-- turn"))
    assert first == "ended by stop (tool_calls for the client)"
    assert second == "ended by length"


def test_characters_that_several_tokens_spell_stay_whole(run: Run, record: Record, renderer: Renderer) -> None:
    text = "你好，世界 👩‍🚀"
    assert len(renderer.tokenizer.encode_plain(text)) > len(text)
    done = run("show", record([(Provenance.USER, "hello"), (Provenance.SAMPLED, text)]), "s")
    assert f"  sampled | {text}\n" in done.stdout


def test_text_can_not_control_the_terminal(run: Run, record: Record) -> None:
    hostile = "\x1b[2J\x07\u202e[red]"
    done = run("show", record([(Provenance.USER, hostile), (Provenance.SAMPLED, "hi")]), "s")
    assert "     user | \\x1b[2J\\x07\\u202e[red]\n" in done.stdout


def test_terminal_gets_colors_and_the_same_text(run: Run, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = record(HELLO)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "  sampled | \x1b[1;32mhi<|im_end|>\x1b[0m" in run("show", directory, "s").stdout


def test_no_color_removes_the_colors(run: Run, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = record(HELLO)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;32m" not in run("show", directory, "s").stdout


def test_ids_are_printed_under_their_text(run: Run, record: Record, renderer: Renderer) -> None:
    ids = renderer.tokenizer.encode_plain("hi<|im_end|>")
    done = run("show", record(HELLO), "s", "--ids")
    assert done.stdout.endswith(f"  sampled | hi<|im_end|>\n          | {' '.join(map(str, ids))}\n")


def test_without_a_known_model_ids_and_a_reason_are_shown(run: Run, data_dir: Path) -> None:
    done = run("show", data_dir, "plain")
    assert done.exit_code == 0
    turn = make_chain("plain", 1)[0]
    assert f"     user | {' '.join(map(str, turn.added_ids))}\n" in done.stdout
    assert f"  sampled | {' '.join(map(str, turn.completion_ids))}\n" in done.stdout
    assert done.stderr.startswith("this record doesn't name the model that was served: showing ids only")


def test_changed_tokenizer_is_not_used(run: Run, record: Record, renderer: Renderer) -> None:
    directory = record(HELLO)
    folder = directory / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}, "added_tokens": []}))
    write_served_model(directory, ServedModel(str(folder), renderer.tokenizer.sha256, renderer.fingerprint))
    done = run("show", directory, "s")
    assert "has changed since: showing ids only" in done.stderr
    assert "hello" not in done.stdout


def test_moved_model_can_be_named(run: Run, record: Record, model_dir: Path, tmp_path: Path) -> None:
    directory = record(HELLO)
    write_served_model(directory, ServedModel(str(tmp_path / "gone"), "", ""))
    assert "the tokenizer is no longer in" in run("show", directory, "s").stderr
    shutil.copytree(model_dir, tmp_path / "moved")
    done = run("show", directory, "s", "--tokenizer", tmp_path / "moved")
    assert done.stderr == ""
    assert "     user | hello\n" in done.stdout


def test_a_fork_is_shown_with_its_cause_verdict_and_the_other_branches(run: Run, data_dir: Path) -> None:
    lines = run("show", data_dir, "forked").stdout.splitlines()
    assert lines[:3] == [
        "session forked, branch of turns 0, 2",
        "verdict forked: branched; role main; reward 0.5; 16 tokens, 8 sampled, 4 with loss",
        "branches end with turns 1, 2: choose one with --leaf",
    ]
    assert "no loss: an earlier branch trains it" in lines[4]
    assert "-- turn 2 | FORK of turn 0: branched | 4 added, 4 sampled" in lines[8]
    assert lines[9] == "   edit of turn 1: other messages after the same history (confidence 0.9)"


def test_another_branch_can_be_chosen(run: Run, data_dir: Path) -> None:
    assert run("show", data_dir, "forked", "--leaf", 1).stdout.startswith("session forked, branch of turns 0, 1\n")


def test_unknown_leaf_is_refused_with_the_known_ones(run: Run, data_dir: Path) -> None:
    done = run("show", data_dir, "forked", "--leaf", 0)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith("error: session 'forked' has no leaf 0; choose from 1, 2\n")


def test_json_is_the_trajectory(run: Run, data_dir: Path) -> None:
    done = run("show", data_dir, "forked", "--json")
    value = json.loads(done.stdout)
    assert (value["session_id"], value["turns"], value["metadata"]) == ("forked", [0, 2], {"task": 1})
    assert done.stderr == ""


def test_without_a_session_id_sessions_are_listed(run: Run, data_dir: Path) -> None:
    assert run("show", data_dir).stdout.splitlines() == [
        "forked  3 turns, 24 tokens, 12 sampled: 'exact', 'forked: branched'",
        "plain  2 turns, 16 tokens, 8 sampled: 'exact'",
    ]
    listed = [json.loads(line) for line in run("show", data_dir, "--json").stdout.splitlines()]
    assert [(session["session_id"], session["turns"], session["verdicts"]) for session in listed] == [
        ("forked", 3, {"exact": 1, "forked: branched": 1}),
        ("plain", 2, {"exact": 1}),
    ]


def test_unreadable_session_does_not_end_the_list(run: Run, tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path / "data") as store:
        turns = [make_turn(name, 0) for name in ("bad", "good")]
        asyncio.run(store.write(SETUP, *[SessionInfo(turn.session_id, 1.0) for turn in turns], *turns))
    corrupt(tmp_path / "data", "bad")
    done = run("show", tmp_path / "data")
    assert done.exit_code == 1
    assert done.stdout.startswith("good  1 turn")
    assert "session 'bad' doesn't match the hash chain" in done.stderr


def test_names_of_sessions_can_not_control_the_terminal(run: Run, tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path / "data") as store:
        name = "a\x1b[2J\u202eb"
        asyncio.run(store.write(SETUP, SessionInfo(name, 1.0), make_turn(name, 0)))
    assert run("show", tmp_path / "data").stdout.startswith(r"a\x1b[2J\u202eb  1 turn")


def test_an_empty_record_and_aborted_turns_are_named(run: Run, tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path / "data") as store:
        assert run("show", tmp_path / "data").stderr == "the record has no sessions\n"
        turn = make_turn("s", 0, finish_reason="abort", stop=None, abort_cause="engine_error")
        asyncio.run(store.write(SessionInfo("s", 1.0), SETUP, turn))
    assert run("show", tmp_path / "data").stdout == "s  1 turn (1 aborted), 8 tokens, 4 sampled\n"
    assert (
        "has only aborted turns (engine_error), so it has no trajectory to show"
        in run("show", tmp_path / "data", "s").stderr
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            [("user", "question 0"), ("assistant", "answer zero"), ("user", "next")],
            "messages[1] (assistant) 'answer zero'; the branch of turn 1 has (assistant) 'answer 0'",
        ),
        (
            [("user", "question 0")] * 2,
            "messages[1] (user) 'question 0'; the branch of turn 1 has (assistant) 'answer 0'",
        ),
        ([("system", "Be brief.")], "messages[0] (system) 'Be brief.'; the branch of turn 1 has (user) 'question 0'"),
    ],
)
def test_an_edited_history_is_shown_with_the_first_message_that_differs(
    run: Run, tmp_path: Path, messages: list[tuple[str, str]], message: str
) -> None:
    sent = tuple({"role": role, "content": content} for role, content in messages)
    fork = make_turn("s", 2, messages=sent, fork="edited_history")
    with SqliteStore.open(tmp_path / "data") as store:
        asyncio.run(store.write(SessionInfo("s", 1.0), SETUP, *make_chain("s", 2), fork))
    assert f"   {message}" in run("show", tmp_path / "data", "s").stdout.splitlines()


def test_lanes_show_token_starts_trained_tokens_and_drift(
    run: Run, record: Record, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    spelled = [token_id for letter in "Let" for token_id in renderer.tokenizer.encode_plain(letter)]
    assert len(spelled) == 3
    monkeypatch.setattr(
        renderer.tokenizer,
        "encode_plain",
        lambda text, plain=renderer.tokenizer.encode_plain: spelled if text == "Let" else plain(text),
    )
    directory = record([(Provenance.USER, "hello"), (Provenance.SAMPLED, "Let")])
    monkeypatch.undo()
    hello = "".join(
        "|" + "-" * (len(renderer.tokenizer.token_bytes(token_id)) - 1) for token_id in _ids(renderer, "hello")
    )
    assert run("show", directory, "s", "--lanes").stdout.splitlines()[2:] == [
        "loss: | begins a token; = trained, - not (a digit: tokens of one character)",
        "logprob: from ▁ likely (probability above 0.37) to █ unlikely (below 0.001)",
        "drift: ^~~ tokenizing the text again gives other tokens here, and which kind",
        "",
        f"-- turn 0 | {len(_ids(renderer, 'hello'))} added, 3 sampled | ended by stop | weights step-1",
        "     user | hello",
        f"     loss | {hello}",
        "  sampled | Let",
        "     loss | |||",
        "  logprob | ▁▁▁",
        "    drift | ^~~ word",
    ]


def test_lanes_fit_the_width_of_the_terminal(
    run: Run, record: Record, monkeypatch: pytest.MonkeyPatch, renderer: Renderer
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = "漢字 and many words\n" * 3 + "x" * 90
    lines = run(
        "show", record([(Provenance.USER, text), (Provenance.SAMPLED, "hi")]), "s", "--lanes"
    ).stdout.splitlines()
    shown = [line for line in lines[7:] if " | " in line]
    assert max(map(cell_len, shown)) <= 40
    # A bar is as wide as its text.
    texts = [line for line in shown if not line.strip().startswith(("loss", "logprob", "drift"))]
    bars = [line for line in shown if line.strip().startswith("loss")]
    assert [cell_len(line) for line in texts] == [cell_len(line) for line in bars]
    # A character of several tokens shows their number.
    count = len(_ids(renderer, "漢"))
    assert bars[0].split(" | ")[1].startswith(f"{count}-")


def _ids(renderer: Renderer, text: str) -> list[int]:
    return renderer.tokenizer.encode_plain(text)


def test_unknown_session_error_suggests_similar_names(run: Run, data_dir: Path) -> None:
    assert run("show", data_dir, "fork").stderr == "error: there is no session 'fork'; did you mean 'forked'?\n"
    assert run("show", data_dir, "zzz").stderr == "error: there is no session 'zzz'\n"


def test_other_logprobs_are_explained_and_unknown_weights_are_not_shown(run: Run, tmp_path: Path) -> None:
    sampled = TokenDistribution(penalties=False, temperature=0.7, truncation=True, grammar=False)
    recorded = TokenDistribution(penalties=False, temperature=1.0, truncation=False, grammar=False)
    turn = make_turn("s", 0, sampled_from=sampled, logprobs_of=recorded, weight_version="unknown")
    with SqliteStore.open(tmp_path / "data") as store:
        asyncio.run(store.write(SessionInfo("s", 1.0), SETUP, turn))
    shown = run("show", tmp_path / "data", "s").stdout
    why = "turn 0 was sampled with temperature 0.7 (logprobs: 1.0), truncation True (logprobs: False)"
    assert f"other logprobs: {why}" in " ".join(shown.split())
    assert "weights" not in shown
