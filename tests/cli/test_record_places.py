"""Commands that measure a record give the same figures for a record in each kind of place."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from tests.cli.conftest import Run
from tests.postgres import Server
from tests.training.scripted_sessions import ANSWER, THOUGHT, played, user
from tokentape.audit._id_rows import iter_rows
from tokentape.chat._renderer import Renderer
from tokentape.store import SqliteStore
from tokentape.store._location import note_served_model, open_record
from tokentape.store._served_model import ServedModel, write_served_model

PASSWORD = "s3cret"
MADE_UP = ("--max-mean", "99", "--max-k3", "99")
"""Limits for handmade logprobs."""


@pytest.fixture
def directory(tmp_path: Path, renderer: Renderer, served: ServedModel) -> Path:
    """Record two turns: the second is sampled in letters, and the reasoning of the first is not rendered again."""
    path = tmp_path / "data"
    with SqliteStore.open(path) as store:
        played(renderer, store, [(user("Pears?"), THOUGHT + "Yes.<|im_end|>"), (user("And?"), ANSWER)], split=[1])
    write_served_model(path, served)
    return path


@pytest.fixture
def served(renderer: Renderer, model_dir: Path) -> ServedModel:
    return ServedModel(str(model_dir), renderer.tokenizer.sha256, renderer.fingerprint)


@pytest.fixture(
    params=[
        "directory",
        pytest.param("database", marks=pytest.mark.slow),
        pytest.param("archive", marks=pytest.mark.slow),
    ]
)
def place(
    request: pytest.FixtureRequest, run: Run, directory: Path, served: ServedModel, tmp_path: Path
) -> Iterator[str]:
    if request.param == "directory":
        yield str(directory)
    elif request.param == "archive":
        archive = tmp_path / "archive"
        assert run("archive", directory, "--to", archive, "--older-than", "0s").exit_code == 0
        yield f"file://{archive}"
    else:
        server: Server = request.getfixturevalue("postgres")
        schema = server.new_place()
        # This server requires no password, so it is only in the URL. Its # does not begin a row name.
        url = make_url(schema).set(password=PASSWORD).render_as_string(False).replace(PASSWORD, f"#{PASSWORD}")
        with open_record(directory, read_only=True) as source, open_record(url) as target:
            for stored in source.iter_sessions():
                asyncio.run(target.write(stored.info, *stored.setups.values(), *stored.turns))
            asyncio.run(note_served_model(url, target, served))
        yield url
        server.drop(schema)


def test_rows_of_ids_are_equal_in_every_place(place: str, directory: Path) -> None:
    rows, expected = list(iter_rows(place)), list(iter_rows(directory))
    assert [(row.name, row.ids.tolist(), row.spans) for row in rows] == [
        (row.name, row.ids.tolist(), row.spans) for row in expected
    ]


def test_drift_is_equal_in_every_place(run: Run, place: str, directory: Path, tmp_path: Path) -> None:
    page = tmp_path / "drift.html"
    done = run("drift", place, "--json", "--html", page)
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["completions"]["changed"], report["completions"]["total"]) == (1, 2)
    assert (report["rerendered"]["turns"]["changed"], report["rerendered"]["turns"]["total"]) == (1, 1)
    assert report == json.loads(run("drift", directory, "--json").stdout)
    assert PASSWORD not in done.output + page.read_text(encoding="utf-8")


@pytest.mark.parametrize("row", ["", "#s", "#s:1"])
def test_two_places_compare_equal(run: Run, place: str, directory: Path, row: str) -> None:
    done = run("compare", f"{place}{row}", directory)
    assert (done.exit_code, done.stdout) == (0, "0 of 1 rows differ\n")
    assert run("compare", directory, f"{place}{row}").stdout == done.stdout


def test_difference_is_reported_without_the_password(run: Run, place: str, directory: Path, tmp_path: Path) -> None:
    (row,) = iter_rows(directory)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"id": row.name, "ids": row.ids[:-1].tolist()}))
    for form in ("json", "sarif", "github"):
        done = run("compare", other, place, "--format", form)
        assert (done.exit_code, PASSWORD in done.output) == (1, False), done.output
    for absent in ("t", "s:7"):
        done = run("compare", other, f"{place}#{absent}")
        assert (done.exit_code, PASSWORD in done.output) == (2, False)
        assert f"'{absent}'" in done.stderr


def test_logprobs_are_equal_in_every_place(run: Run, place: str, directory: Path, model_dir: Path) -> None:
    arguments = ("--model", model_dir, "--rerender", "--json", *MADE_UP)
    done = run("check-logprobs", place, *arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["numeric"]["tokens"] > 0
    assert report["if_rerendered"]["text_drift"]["kinds"] == {"reasoning": 1}
    assert report == json.loads(run("check-logprobs", directory, *arguments).stdout)


def test_served_model_is_the_default_trainer(run: Run, place: str, model_dir: Path) -> None:
    done = run("check-logprobs", place, "--json", *MADE_UP)
    assert PASSWORD not in done.output
    assert done.exit_code == 0, done.stderr
    assert done.stderr.startswith(f"model: {model_dir}, the one that ")
    named = run("check-logprobs", place, "--model", model_dir, "--json", *MADE_UP)
    assert done.stdout == named.stdout


def test_missing_or_changed_tokenizer_is_reported_with_advice(
    run: Run, directory: Path, served: ServedModel, model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write_served_model(directory, ServedModel(str(folder), served.tokenizer_sha256, served.fingerprint))
    for command, option in (("drift", "--tokenizer"), ("check-logprobs", "--model")):
        done = run(command, directory)
        assert (done.exit_code, "is no longer in" in done.stderr) == (2, True)
        assert f"with {option}\n" in done.stderr
    shutil.copytree(model_dir, folder)
    with (folder / "tokenizer.json").open("a") as file:
        file.write("\n")
    done = run("check-logprobs", directory)
    assert (done.exit_code, "has changed since" in done.stderr) == (2, True)
    assert "with --model\n" in done.stderr


@pytest.mark.parametrize("command", ["drift", "check-logprobs", "show", "view"])
def test_incomplete_url_error_shows_the_expected_form(run: Run, tmp_path: Path, command: str) -> None:
    done = run(command, f"file://{tmp_path}/nothing")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is not an archive" in done.stderr
    assert "name the target of `tokentape archive --to`" in done.stderr
