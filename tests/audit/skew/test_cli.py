"""The command as people and scripts use it: exit codes, stdout, JSON and a separate page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokentape.cli.app import app
from tokentape.demo import MODEL

run = CliRunner()


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skew") / "model"
    shutil.copytree(MODEL, folder)
    spec = json.loads((folder / "tokenizer.json").read_bytes())
    (folder / "tokenizer.json").write_text(json.dumps({**spec, "normalizer": None}))
    return folder


def test_sides_that_agree_exit_with_0() -> None:
    done = run.invoke(app, ["audit", str(MODEL), str(MODEL)])
    assert done.exit_code == 0, done.output
    assert "No skew found" in done.stdout


def test_skew_exits_with_1_and_shows_cause_smallest_input_and_both_ids(skewed: Path) -> None:
    done = run.invoke(app, ["audit", str(MODEL), str(skewed)])
    assert done.exit_code == 1
    assert "1. normalizer" in done.stdout
    assert "NFC in A and none in B" in done.stdout
    assert "[127 \\xc3, 102 \\xa9]" in done.stdout
    assert "[68 e, 136 \\xcc, 223 \\x81]" in done.stdout


def test_json_has_the_same_findings_and_stdout_holds_nothing_else(skewed: Path) -> None:
    done = run.invoke(app, ["audit", str(MODEL), str(skewed), "--json"])
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["skewed"] is True
    (finding,) = report["findings"]
    assert finding["kind"] == "normalizer"
    assert finding["example"] == {"text": "e\u0301"}
    assert finding["a"]["ids"] == [127, 102]
    assert finding["a"]["tokens"] == ["\\xc3", "\\xa9"]
    assert report["a"]["parts"]["normalizer"] == '{"type": "NFC"}'
    assert len(report["a"]["files"]["tokenizer.json"]) == 64
    assert report["a"]["versions"]["tokenizers"]


def test_the_page_holds_the_findings_and_loads_nothing(skewed: Path, tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("cafe\u0301 <script>alert(1)</script>\n")
    done = run.invoke(app, ["audit", str(MODEL), str(skewed), "--html", str(page), "--corpus", str(corpus)])
    assert done.exit_code == 1
    text = page.read_text()
    assert "NFC in A and none in B" in text
    assert "get different ids on the serving side" in text
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")


def test_unwritable_page_is_refused_before_measuring(skewed: Path, tmp_path: Path) -> None:
    done = run.invoke(app, ["audit", str(MODEL), str(skewed), "--json", "--html", str(tmp_path / "none" / "a.html")])
    assert done.exit_code == 2
    assert "does not exist; create it" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", str(MODEL)], "there is no nowhere"),
        ([str(MODEL), str(MODEL), "--kwargs", "[]"], "expected a JSON object"),
        ([str(MODEL), str(MODEL), "--kwargs-b", "{"], "expected a JSON object, found {: Expecting"),
        ([str(MODEL), str(MODEL), "--date", "today"], "expected a date"),
        ([str(MODEL), str(MODEL), "--corpus", "nowhere.txt"], "nowhere.txt"),
        ([str(MODEL)], "Missing argument"),
    ],
)
def test_invalid_requests_exit_with_2(arguments: list[str], message: str) -> None:
    done = run.invoke(app, ["audit", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr.replace("\n", " ")


def test_unreadable_tokenizer_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    done = run.invoke(app, ["audit", str(MODEL), str(tmp_path)])
    assert done.exit_code == 2
    assert "error:" in done.stderr


def test_template_and_kwargs_can_be_given_for_one_side(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        (MODEL / "chat_template.jinja").read_text().replace("'<|im_start|>user\\n'", "'<|im_start|>user '")
    )
    done = run.invoke(app, ["audit", str(MODEL), str(MODEL), "--template-b", str(template), "--json"])
    assert done.exit_code == 1
    assert [finding["kind"] for finding in json.loads(done.stdout)["findings"]] == ["template"]
