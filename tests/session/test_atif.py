"""Documents of ATIF: steps, ids and logprobs; where Harbor is installed, as its own model of the format reads them."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.session.builders import assistant, make_turn, user
from tests.training.interpreters import PYTHONS, lacking
from tests.training.scripted_sessions import ANSWER, THOUGHT, TOOL_CALL, played
from tokentape._session.atif import atif_document
from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.errors import InvalidRequest
from tokentape.store import SqliteStore
from tokentape.types import MediaSpan, SessionInfo, Setup, Turn

READ = """import sys
from harbor.models.trajectories import Trajectory
for line in sys.stdin:
    Trajectory.model_validate_json(line)"""
SETUPS = {"setup": Setup((), {}, "2026-01-01", "")}


def documents(*turns: Turn) -> list[dict[str, Any]]:
    session = Session(SessionInfo("s", 1.0, {"agent": "mine"}), turns)
    made, earlier = [], set[int]()
    for trajectory in trajectories(session):
        made.append(atif_document(session, SETUPS, trajectory, earlier))
        earlier.update(trajectory.turns)
    return made


def forked() -> list[dict[str, Any]]:
    return documents(
        make_turn(0, None, [user("a")], assistant("b")),
        make_turn(1, 0, [user("c")], assistant("d")),
        make_turn(2, 0, [user("e")], assistant("f"), fork="branched"),
    )


def test_a_step_has_the_exact_ids_of_its_call(renderer: Renderer, tmp_path: Path) -> None:
    exchanges = [
        (user("How much are pears?"), THOUGHT + TOOL_CALL),
        ({"role": "tool", "content": "12", "tool_call_id": ""}, ANSWER),
    ]
    with SqliteStore.open(tmp_path) as store:
        stored = played(renderer, store, exchanges)
    (branch,) = stored.trajectories()
    document = atif_document(stored.tree(), stored.setups, branch)
    user_step, call_step, final_step = document["steps"]
    assert (user_step["source"], user_step["message"]) == ("user", "How much are pears?")
    assert call_step["reasoning_content"] == "I need the price of pears."
    (call,) = call_step["tool_calls"]
    assert (call["function_name"], call["arguments"]) == ("lookup", {"item": "pears"})
    assert call_step["observation"]["results"] == [{"source_call_id": call["tool_call_id"], "content": "12"}]
    assert final_step["message"] == "The answer is 12."
    for turn, step in zip(stored.turns, (call_step, final_step), strict=True):
        metrics = step["metrics"]
        assert metrics["completion_token_ids"] == turn.completion_ids.tolist()
        assert np.float32(metrics["logprobs"]).tolist() == turn.logprobs.tolist()
    last = final_step["metrics"]
    assert last["prompt_token_ids"] + last["completion_token_ids"] == branch.token_ids.tolist()
    assert document["agent"]["tool_definitions"] == list(stored.setups[stored.turns[0].setup].tools)


def test_call_without_tokens_is_not_a_copy_and_names_all_its_weights() -> None:
    empty = make_turn(0, None, [user("a")], assistant(""), completion=())
    later = replace(make_turn(1, 0, [user("b")], assistant("c")), weight_changes=((1, "2"),))
    (document,) = documents(empty, later)
    assert not any("is_copied_context" in step for step in document["steps"])
    about = document["steps"][-1]["metrics"]["extra"]
    assert (about["weight_version"], about["weight_changes"]) == ("1", ((1, "2"),))


def test_steps_of_an_earlier_document_are_copied_context() -> None:
    first, second = forked()
    assert not any("is_copied_context" in step for step in first["steps"])
    assert [step.get("is_copied_context", False) for step in second["steps"]] == [True, True, False, False]
    assert [document["trajectory_id"] for document in (first, second)] == ["s/1", "s/2"]


def test_arguments_that_are_not_an_object_are_kept_separately() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1"}}
    (document,) = documents(
        make_turn(0, None, [user("a")], {"role": "assistant", "content": None, "tool_calls": [call]})
    )
    assert document["steps"][-1]["tool_calls"] == [
        {"tool_call_id": "c", "function_name": "f", "arguments": {}, "extra": {"arguments": "[1"}}
    ]


@pytest.mark.parametrize(
    "arguments", ['{"a": NaN}', '{"a": [-Infinity]}', '{"a": 1e999}', '{"a":' * 100_000 + "1" + "}" * 100_000]
)
def test_arguments_that_strict_json_refuses_are_kept_separately(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    (document,) = documents(make_turn(0, None, [user("a")], reply))
    (written,) = document["steps"][-1]["tool_calls"]
    assert (written["arguments"], written["extra"]) == ({}, {"arguments": arguments})
    json.dumps(document, allow_nan=False)


def test_result_without_a_call_has_no_source() -> None:
    lost = {"role": "tool", "tool_call_id": "gone", "content": "x"}
    (document,) = documents(make_turn(0, None, [lost], assistant("b")))
    assert document["steps"][0]["observation"] == {"results": [{"source_call_id": None, "content": "x"}]}


def test_images_are_refused() -> None:
    session = Session(SessionInfo("s", 1.0), [make_turn(0, None, [user("a")], assistant("b"))])
    (branch,) = trajectories(session)
    with pytest.raises(InvalidRequest, match="has images"):
        atif_document(session, {}, replace(branch, media=(MediaSpan(0, 1, "a", "b"),)))


@pytest.mark.differential
def test_harbor_reads_the_documents(renderer: Renderer, tmp_path: Path) -> None:
    exchanges = [
        (user("How much are pears?"), THOUGHT + TOOL_CALL),
        ({"role": "tool", "content": "12", "tool_call_id": ""}, ANSWER),
    ]
    with SqliteStore.open(tmp_path) as store:
        stored = played(renderer, store, exchanges)
    made = [
        *forked(),
        *(atif_document(stored.tree(), stored.setups, trajectory) for trajectory in stored.trajectories()),
    ]
    for python in PYTHONS:
        if subprocess.run([python, "-c", "import harbor.models.trajectories"], capture_output=True).returncode == 0:
            lines = "\n".join(map(json.dumps, made))
            run = subprocess.run([python, "-c", READ], input=lines, capture_output=True, text=True)
            assert run.returncode == 0, run.stderr[-2000:]
            return
    lacking("harbor")
