from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.chat.conftest import (
    EVERY_FAMILY,
    FAMILIES,
    KINDS,
    REAL_FAMILIES,
    SMALL,
    load_tokenizer,
    model_path,
    slow_unless,
)
from tests.data import REAL
from tests.searching import examples
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest, TokenizerUnusable


def lines(family: str) -> list[str]:
    """Return texts in many scripts, with code, runs of spaces and emoji: the corpus, or the texts of golden ids."""
    names = ("small", "mixed", "utf8")
    golden = [REAL / "goldens" / f"{name}_input.txt" for name in names] if family.startswith("real/") else []
    return [
        line
        for path in [SMALL.parent / "corpus.txt", *golden]
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_marked_text_encodes_as_the_plain_tokenizer_does(family: str) -> None:
    tokenizer = load_tokenizer(family)
    framing = [control.content for control in tokenizer.controls[:8]]
    for line in lines(family):
        for text in (line, "".join(f"{control} {line}\n" for control in framing)):
            marked = tokenizer.mark_controls(text)
            assert tokenizer.encode_marked(marked).ids == tokenizer.encode_plain(text)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_spelled_control_tokens_stay_text(family: str) -> None:
    tokenizer = load_tokenizer(family)
    control_ids = {control.id for control in tokenizer.controls}
    for control in tokenizer.controls[:64]:
        for text in (control.content, f"a{control.content}b", f" {control.content}\n{control.content}"):
            ids = tokenizer.encode_marked(text).ids
            assert control_ids.isdisjoint(ids)
            assert tokenizer.decode(ids).strip() == text.strip()


@pytest.mark.parametrize(
    "family",
    [*KINDS, *map(slow_unless, REAL_FAMILIES)],
)
@given(text=st.text(max_size=40))
@settings(max_examples=examples(60))
@example("two  spaces")
def test_any_text_encodes_as_the_plain_tokenizer_does(family: str, text: str) -> None:
    tokenizer = load_tokenizer(family)
    if not tokenizer.control_pattern.search(text):
        assert tokenizer.encode_marked(text).ids == tokenizer.encode_plain(text)


def test_special_tokens_are_added_to_plain_text_only_on_request() -> None:
    tokenizer = load_tokenizer("llama3")
    begin = tokenizer.control("<|begin_of_text|>")
    assert begin is not None
    assert tokenizer.encode_plain("hi", add_special_tokens=True) == [begin.id, *tokenizer.encode_plain("hi")]


def test_plain_text_is_never_truncated_or_padded() -> None:
    spec = json.loads((model_path("qwen3") / "tokenizer.json").read_bytes())
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    cutting = Tokenizer(json.dumps(spec).encode(), {})
    text = "one two three four"
    assert cutting.encode_plain(text) == load_tokenizer("qwen3").encode_plain(text)


@pytest.mark.parametrize("start", [0x100000, 0xF0000, 0x108000])
def test_private_use_characters_are_text(start: int) -> None:
    tokenizer = load_tokenizer("qwen3")
    text = "".join(map(chr, range(start, start + 30)))
    assert tokenizer.encode_marked(text).ids == tokenizer.encode_plain(text)


@pytest.mark.parametrize("text", ["a\udc80b", "no token has this mark: \udb00\udfff"])
def test_a_lone_surrogate_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        load_tokenizer("qwen3").encode_marked(text)


def test_text_after_a_control_token_gets_no_leading_space() -> None:
    tokenizer = load_tokenizer("mistral_v3_spm")
    alone = [tokenizer.token_bytes(i) for i in tokenizer.encode_marked("hello").ids]
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode_after_control("hello").ids]
    assert b"".join(alone) == b" hello"
    assert b"".join(pieces) == b"hello"


@pytest.mark.parametrize("family", FAMILIES)
def test_text_after_text_is_encoded_as_a_part_of_the_whole(family: str) -> None:
    tokenizer = load_tokenizer(family)
    for before, after in (("say ]]", "\n### user"), ("</think", ">\n\n"), ("some", "thing"), ("one", " two")):
        whole = tokenizer.encode_after_control(before + after).ids
        first, second = tokenizer.encode_after_control(before), tokenizer.encode_after(before, after)
        assert "".join(tokenizer.token_bytes(i).decode() for i in second.ids).strip() == after.strip()
        if whole[: len(first.ids)] == first.ids:
            assert [*first.ids, *second.ids] == whole
            assert second.text == after
            assert [int(second.spans[0][0]), int(second.spans[-1][1])] == [0, len(after)]


def test_partial_characters_decode_to_their_bytes() -> None:
    tokenizer = load_tokenizer("qwen3")
    ids = tokenizer.encode_plain("\U00012345")
    assert len(ids) > 1
    assert b"".join(map(tokenizer.token_bytes, ids)) == "\U00012345".encode()
    assert tokenizer.decode(ids[:-1]) == "�"


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    tokenizer = load_tokenizer("qwen3")
    with pytest.raises(InvalidRequest, match=str(tokenizer.vocab_size)):
        tokenizer.token_bytes(tokenizer.vocab_size)


@pytest.mark.parametrize("token_id", [-100, -1, 2**40])
def test_bytes_of_a_number_that_is_no_id_are_refused(token_id: int) -> None:
    with pytest.raises(InvalidRequest, match=f"token id {token_id} is not in the vocabulary"):
        load_tokenizer("qwen3").token_bytes(token_id)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(TokenizerUnusable, match=r"found: weights\.bin"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[]", b"{}", b'{"model": {"vocab": 5}}'])
def test_a_damaged_tokenizer_is_refused(tmp_path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerUnusable, match=r"tokenizer\.json is corrupt or not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_tokenizers_refused_by_the_library_are_refused(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "added_tokens": []}')
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(TokenizerUnusable, match=r"can't load tokenizer\.json"):
        tokenizer.encode_marked("a")
    with pytest.raises(TokenizerUnusable, match=r"can't load tokenizer\.json"):
        tokenizer.encode_plain("a")


def test_a_tokenizer_with_dropout_is_refused(tmp_path) -> None:
    """Each encoding would have other ids; keeping control tokens apart has nothing to do with it."""
    spec = json.loads((model_path("qwen3") / "tokenizer.json").read_text(encoding="utf-8"))
    spec["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(TokenizerUnusable, match=r"dropout is 0\.1"):
        Tokenizer.load(tmp_path)


def test_folder_that_requires_remote_code_is_refused(tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_path("mistral_v3_spm") / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["x.Y", None]}}))
    with pytest.raises(TokenizerUnusable, match="auto_map"):
        Tokenizer.load(tmp_path)


def test_more_control_tokens_than_one_first_surrogate_has_marks_for() -> None:
    model = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    model.add_special_tokens([f"<|{n}|>" for n in range(1100)])
    tokenizer = Tokenizer(model.to_str().encode(), {})
    assert tokenizer.encode_marked(tokenizer.mark_controls("<|0|>a<|1099|>")).ids == [1, 0, 1100]


@pytest.mark.parametrize("ids", [[1.5], [-1], [2**40], [[1]], "12", None])
def test_an_array_of_anything_but_whole_numbers_is_refused(ids: Any) -> None:
    with pytest.raises(InvalidRequest, match="expected a flat list of whole numbers"):
        load_tokenizer("qwen3").array(ids)
