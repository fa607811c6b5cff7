"""Tokens per character and byte, against counting by hand."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.chat.conftest import load_tokenizer
from tokentape.audit._premium import (
    Line,
    _by_script,
    measure_premium,
    premium_layout,
    read_corpus,
    script_of,
    scripts_of,
)
from tokentape.chat._renderer import Renderer
from tokentape.cli import app
from tokentape.errors import InvalidRequest, NothingToMeasure


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "en.txt").write_text("All are born free.\n\nThey have reason.\n", encoding="utf-8")
    (folder / "ru.txt").write_text("Все рождаются свободными.\nОни наделены разумом.\n", encoding="utf-8")
    lines = [{"text": "すべて自由", "lang": "ja"}, {"text": "理性を", "lang": "ja"}]
    (folder / "more.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return folder


def test_languages_are_counted_as_the_tokenizer_counts(renderer: Renderer, corpus: Path) -> None:
    found = measure_premium({"tiny": renderer.tokenizer}, read_corpus([corpus]))
    rows = {row.name: row for row in found.languages}
    assert set(rows) == {"en", "ru", "ja"}
    for name, texts in (("en", ["All are born free.", "They have reason."]), ("ja", ["すべて自由", "理性を"])):
        assert rows[name].lines == 2
        assert rows[name].characters == sum(map(len, texts))
        assert rows[name].bytes == sum(len(text.encode()) for text in texts)
        assert rows[name].tokens == sum(len(renderer.tokenizer.encode_plain(text)) for text in texts)
        assert rows[name].premium is None


def test_the_premium_is_over_the_baseline(renderer: Renderer, corpus: Path) -> None:
    found = measure_premium({"tiny": renderer.tokenizer}, read_corpus([corpus]), baseline="en")
    rows = {row.name: row for row in found.languages}
    assert rows["en"].premium == 1
    assert rows["ru"].premium == rows["ru"].tokens / rows["en"].tokens
    assert rows["ru"].premium > 1


@pytest.mark.parametrize(("baseline", "words"), [("fr", "no language 'fr'"), ("en", "de has 1")])
def test_a_premium_without_translations_is_refused(renderer: Renderer, baseline: str, words: str) -> None:
    lines = [Line("en", "a"), Line("en", "b"), Line("de", "c")]
    with pytest.raises(InvalidRequest, match=words):
        measure_premium({"tiny": renderer.tokenizer}, lines, baseline=baseline)


@given(st.text(min_size=1, max_size=30).filter(str.strip))
def test_tokens_of_scripts_add_up_to_those_of_the_text(renderer: Renderer, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    found = measure_premium({"tiny": renderer.tokenizer}, [Line("x", text)])
    (whole,) = found.languages
    assert sum(row.tokens for row in found.scripts) == pytest.approx(whole.tokens)
    assert sum(row.characters for row in found.scripts) == len(text)
    assert sum(row.bytes for row in found.scripts) == len(text.encode())


@pytest.mark.parametrize("family", ["qwen3", "mistral_v3_spm"])
def test_each_script_of_a_mixed_line_is_charged_for_its_own_tokens(family: str) -> None:
    tokenizer = load_tokenizer(family)
    parts = {"Latin": "free and equal", "Cyrillic": " свобода и разум", "Hangul": " 인간의 존엄"}
    found = measure_premium({"x": tokenizer}, [Line("mixed", "".join(parts.values()))])
    for row in found.scripts:
        alone = len(tokenizer.encode_plain(parts[row.name]))
        assert abs(row.tokens - alone) <= 1.5


def test_a_long_line_costs_as_much_per_letter_as_a_short_one() -> None:
    def seconds(letters: int) -> float:
        start = time.thread_time()
        assert _by_script("я" * letters) == {"Cyrillic": (letters, 2 * letters)}
        return time.thread_time() - start

    short, long = (min(seconds(letters) for _ in range(3)) for letters in (20_000, 320_000))
    assert long < 60 * short  # 16 times if linear, 256 times if quadratic


def test_scripts_are_recognized_by_letters() -> None:
    assert [script_of(char) for char in "aéяαあ漢한アابדไत"] == [
        *("Latin", "Latin", "Cyrillic", "Greek", "Hiragana", "Han", "Hangul", "Katakana"),
        *("Arabic", "Arabic", "Hebrew", "Thai", "Devanagari"),
    ]
    assert {script_of(char) for char in "1 .🙂\n_€"} == {"Common"}
    assert script_of("Ａ") == "Latin"
    assert scripts_of("1 a, я!") == ["Latin"] * 5 + ["Cyrillic"] * 2
    assert scripts_of("12") == ["Common", "Common"]


@pytest.mark.parametrize("content", [b'{"texts": 1}', b'{"text": 1}', b"[1]", b"{"])
def test_a_json_line_without_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"a\.jsonl: expected an object"):
        list(read_corpus([tmp_path]))


def test_half_a_surrogate_pair_in_json_does_not_stop_a_count(renderer: Renderer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d \u00e9", "lang": "x\\ud83d"}\n', encoding="utf-8")
    (row,) = measure_premium({"tiny": renderer.tokenizer}, read_corpus([tmp_path])).languages
    assert (row.name, row.characters) == ("x?", 4)


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\n")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        list(read_corpus([tmp_path / "a.txt"]))


def test_a_byte_order_mark_is_no_character_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "en.txt").write_text("Hello\n", encoding="utf-8-sig")
    assert [line.text for line in read_corpus([tmp_path / "en.txt"])] == ["Hello"]


def test_an_empty_file_does_not_leave_a_language_out(corpus: Path) -> None:
    (corpus / ".gitkeep").touch()
    assert {line.language for line in read_corpus(corpus)} == {"en", "ru", "ja"}
    (corpus / "de.txt").write_text("\n \n", encoding="utf-8")
    with pytest.raises(NothingToMeasure, match=r"de\.txt has no text"):
        list(read_corpus(corpus))


def test_an_empty_corpus_is_refused(renderer: Renderer) -> None:
    with pytest.raises(InvalidRequest, match="no text"):
        measure_premium({"tiny": renderer.tokenizer}, [])


def test_the_page_has_the_numbers_of_the_table(renderer: Renderer, corpus: Path) -> None:
    found = measure_premium({"tiny": renderer.tokenizer}, read_corpus([corpus]), baseline="en")
    shown = premium_layout(found).html()
    assert "<svg" in shown
    for row in found.languages:
        assert f'<td class="n">{row.tokens_per_character:.3f}</td>' in shown
        assert f"{row.name}, tiny" in shown


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["premium", *map(str, arguments)])


def test_the_command_prints_a_table_or_json_and_writes_a_page(model_dir: Path, corpus: Path, tmp_path: Path) -> None:
    done = command(model_dir, "--corpus", corpus, "--baseline", "en", "--html", tmp_path / "premium.html")
    assert (done.exit_code, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Cyrillic" in done.stdout
    assert "charac " not in done.stdout  # a header may break between words only
    assert (tmp_path / "premium.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    rows = json.loads(command(model_dir, "--corpus", corpus, "--lines", 1, "--json").stdout)["languages"]
    assert {row["lines"] for row in rows} == {1}


def test_unwritable_page_is_refused_before_counting(model_dir: Path, corpus: Path, tmp_path: Path) -> None:
    done = command(model_dir, "--corpus", corpus, "--html", tmp_path / "none" / "a.html")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "none" in done.stderr


@pytest.mark.parametrize("arguments", [["--baseline", "fr"], ["--baseline"]])
def test_invalid_arguments_are_usage_errors(model_dir: Path, corpus: Path, arguments: list[str]) -> None:
    assert command(model_dir, "--corpus", corpus, *arguments).exit_code == 2
    assert command("nowhere", "--corpus", corpus).exit_code == 2


def test_one_path_as_text_is_one_file(tmp_path: Path) -> None:
    file = tmp_path / "en.txt"
    file.write_text("hello\n")
    assert [line.text for line in read_corpus(str(file))] == ["hello"]
