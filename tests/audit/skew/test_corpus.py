"""The user's corpus: every document once, for any ranges, format and number of processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.audit.skew.cases import TINY, base, healthy
from tokentape.audit._skew import chat_probes, corpus
from tokentape.audit._skew.auditor import audit
from tokentape.audit._skew.backends import BackendOptions, open_backend
from tokentape.audit._skew.causes import TextCauses
from tokentape.audit._skew.corpus import Range, compare_corpus, compare_range, conversations_of, documents_of
from tokentape.demo import MODEL
from tokentape.errors import InvalidRequest

LINES = st.lists(st.text("ab é\u20ac", max_size=9), max_size=12)


@given(lines=LINES, cut=st.integers(0, 60))
def test_ranges_of_a_file_hold_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cut: int
) -> None:
    path = tmp_path_factory.mktemp("corpus") / "c.txt"
    data = "\n".join(lines).encode()
    path.write_bytes(data)
    cut = min(cut, len(data))
    texts = [*documents_of(Range(path, 0, cut)), *documents_of(Range(path, cut, len(data)))]
    assert "".join(texts).encode() == data


def test_json_lines_give_their_texts_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    records = [
        {"text": "one"},
        {"messages": [{"role": "user", "content": "two"}, {"role": "x", "content": None}]},
        "three",
        {"n": 4},
        {"messages": 5},
    ]
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    assert list(documents_of(Range(path, 0, path.stat().st_size))) == ["one", "two", "three"]


def test_conversations_of_the_corpus_are_rendered_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four conversations, the one with a system message is written in another way by side B."""
    user, other = {"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}
    records = [
        *(
            {"messages": messages}
            for messages in ([user], [other, user], [user, {"role": "assistant", "content": "ok"}], [user])
        ),
        *({"messages": messages} for messages in (5, [], [{"content": "x"}], ["x"])),
    ]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    template = (MODEL / "chat_template.jinja").read_text()
    changed = tmp_path / "t.jinja"
    changed.write_text(template.replace("{%", "{%- if messages[0].role == 'system' %}!{% endif %}{%", 1))
    monkeypatch.setattr(chat_probes, "conversations", lambda control=None: [])
    a, b = open_backend(str(MODEL)), open_backend(str(MODEL), BackendOptions(template=changed))
    own = list(conversations_of([path]))
    found = chat_probes.ChatProbe(a, b, TextCauses(a, b))
    found.compare(lambda what: None, own)
    assert [(chat.name, chat.generate) for chat in own] == [
        ("c.jsonl conversation 1", True),
        ("c.jsonl conversation 2", True),
        ("c.jsonl conversation 3", False),
        ("c.jsonl conversation 4", True),
    ]
    assert (found.counts["own"], found.counts["own differing"]) == (4, 1)
    assert [finding.kind for finding in found.findings] == ["template"]


def test_half_a_surrogate_pair_in_json_does_not_stop_an_audit(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "a\\ud83d b \\u00e9"}\n')
    assert list(documents_of(Range(path, 0, path.stat().st_size))) == ["a? b é"]
    assert compare_range(healthy(TINY), healthy(TINY), Range(path, 0, 100))[0]["differing"] == 0


def test_a_line_that_is_not_json_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("{no\n")
    with pytest.raises(InvalidRequest, match="not JSON"):
        audit(healthy(TINY), healthy(TINY), corpus=[path])


def test_documents_that_differ_are_counted_and_explained_by_one_cause(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    texts = ["plain words", "cafe\u0301 one", "more words", "two e\u0301 e\u0301", "x" * 900 + "o\u0308"]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    sick = base(TINY).side(spec={**base(TINY).spec, "normalizer": None})
    report = audit(healthy(TINY), sick, corpus=[tmp_path])
    assert report.corpus is not None
    assert (report.corpus.documents, report.corpus.differing) == (5, 3)
    (finding,) = report.findings
    assert finding.kind == "normalizer"
    assert "c.jsonl" in finding.where
    without = audit(healthy(TINY), sick).findings[0]
    assert finding.count == without.count + 3


def test_processes_find_what_one_process_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skewed = tmp_path / "skewed"
    skewed.mkdir()
    (skewed / "tokenizer.json").write_text(json.dumps({**base(TINY).spec, "normalizer": None}))
    path = tmp_path / "c.txt"
    path.write_text("".join(f"line {n} cafe{chr(0x301) if n % 97 == 0 else ''}\n" for n in range(9000)))
    monkeypatch.setattr(corpus, "RANGE_BYTES", 60_000)
    monkeypatch.setattr(corpus, "_SMALL", 0)
    from tokentape.audit._skew.backends import open_backend

    a, b = open_backend(str(MODEL)), open_backend(str(skewed))
    many, differing = compare_corpus(a, b, [path], workers=2)
    alone, expected = compare_corpus(a, b, [path], workers=1)
    assert (many.documents, many.tokens, many.differing) == (alone.documents, alone.tokens, alone.differing)
    assert sorted(difference.text for difference in differing) == sorted(difference.text for difference in expected)
    assert many.bytes == path.stat().st_size


@pytest.mark.parametrize("missing", ["nowhere.txt", "."])
def test_a_corpus_that_is_not_there_is_an_error(tmp_path: Path, missing: str) -> None:
    with pytest.raises(InvalidRequest, match="corpus"):
        corpus.corpus_files([tmp_path / missing])


def test_one_path_as_text_is_one_file_of_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello\n")
    assert audit(healthy(TINY), healthy(TINY), corpus=str(tmp_path / "a.txt")).tried["corpus"] == 1
