"""A training tokenizer over real ones: old ids stay, new ids are stable, and saved tokenizers load to the same ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.conftest import REAL_FAMILIES, SMALL, model_path
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest, TokenizerUnusable
from tokentape.training._proof import prove
from tokentape.training._tokenizer import TrainingTokenizer, codebook

TEXT = "Hello <|item_0_3|><|item_2_1|> 12  x\n\n<|im_end|> 🫠 é"


@pytest.fixture(scope="session")
def training(model_dir: Path) -> TrainingTokenizer:
    return TrainingTokenizer.load(model_dir, pad="<|pad|>").with_block("item", codebook("item", [4, 4, 4]))


def test_new_ids_follow_the_old_ids_and_rows_are_rounded_up(training: TrainingTokenizer) -> None:
    assert (training.pad_id, training.block("item").ids) == (4000, range(4001, 4013))
    assert (training.vocab_size, training.known.sum()) == (4032, 4013)


def test_adding_a_block_again_or_after_another_moves_no_id(training: TrainingTokenizer) -> None:
    assert training.with_block("item", codebook("item", [4, 4, 4])) is training
    more = training.with_block("user", ["<|user_a|>"])
    assert more.blocks[:2] == training.blocks
    assert more.block("user").ids == range(4013, 4014)


def test_new_tokens_encode_to_a_single_id_also_between_words(training: TrainingTokenizer) -> None:
    ids = training.tokenizer.encode_plain("see<|item_1_0|>here")
    assert ids.count(training.block("item").first_id + 4) == 1
    assert training.tokenizer.decode(ids) == "see<|item_1_0|>here"


def test_caller_text_never_becomes_a_new_token(training: TrainingTokenizer) -> None:
    ids = training.tokenizer.encode_marked("see<|item_1_0|>here").ids
    assert not set(ids) & set(training.block("item").ids)


@given(st.text())
def test_any_text_keeps_its_ids(model_dir: Path, training: TrainingTokenizer, text: str) -> None:
    assert training.tokenizer.encode_plain(text) == Tokenizer.load(model_dir).encode_plain(text)


def test_padding_token_is_not_eos_unless_requested(model_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match="is also an end-of-sequence token"):
        TrainingTokenizer.load(model_dir)
    with pytest.raises(InvalidRequest, match="is also an end-of-sequence token"):
        TrainingTokenizer.load(model_dir, pad="<|im_end|>")
    assert TrainingTokenizer.load(model_dir, pad_is_eos=True).pad_token == "<|endoftext|>"


def test_existing_token_can_be_the_padding_token_without_an_addition(model_dir: Path) -> None:
    made = TrainingTokenizer.load(model_dir, pad="<|im_start|>")
    assert (made.pad_id, made.blocks) == (3992, ())
    assert made.source == (model_dir / "tokenizer.json").read_bytes()


def test_tokenizer_without_padding_token_is_refused_with_advice() -> None:
    with pytest.raises(InvalidRequest, match="has no padding token"):
        TrainingTokenizer.load(SMALL / "llama3")


def test_ids_of_padding_rows_are_refused_with_their_position(training: TrainingTokenizer) -> None:
    training.check_ids(np.array([0, 4012], np.int32))
    for bad in (4013, 4031, 4032, -1):
        with pytest.raises(InvalidRequest, match=f"id {bad} at position 1"):
            training.check_ids(np.array([5, bad, 5], np.int32))


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (["<|im_end|>"], "is already in the vocabulary"),
        (["Hello"], "is already in the vocabulary"),
        (["<|im_end|><|x|>"], "contains a control token"),
        (["two words"], "looks like a word"),
        (["<|a|>", "<|a|>"], "twice"),
        ([], "at least one token"),
    ],
)
def test_a_token_that_would_change_old_text_is_refused(
    training: TrainingTokenizer, tokens: list[str], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        training.with_block("more", tokens)


def test_tokens_of_an_existing_block_can_not_be_changed(training: TrainingTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="other tokens"):
        training.with_block("item", ["<|a|>"])
    with pytest.raises(InvalidRequest, match="the blocks are: pad, item"):
        training.block("nothing")


def test_saved_tokenizer_loads_to_the_same(training: TrainingTokenizer, tmp_path: Path) -> None:
    training.save(tmp_path)
    again = TrainingTokenizer.load(tmp_path)
    assert (again.blocks, again.pad_id, again.vocab_size) == (training.blocks, training.pad_id, training.vocab_size)
    assert again.source == training.source
    assert again.tokenizer.eos_ids == training.tokenizer.eos_ids
    assert json.loads((tmp_path / "generation_config.json").read_text())["pad_token_id"] == 4000


def test_layout_of_another_tokenizer_is_refused(training: TrainingTokenizer, tmp_path: Path) -> None:
    training.save(tmp_path)
    path = tmp_path / "training_tokenizer.json"
    path.write_text(path.read_text().replace('"first_id": 4001', '"first_id": 4002'))
    with pytest.raises(TokenizerUnusable, match="should have id 4002"):
        TrainingTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", "{}", '{"multiple_of": "64", "blocks": []}'),
        '{"multiple_of": 64, "blocks": [{"name": "a"}]}',
        '{"multiple_of": 64, "blocks": [{"name": "a", "first_id": 4000, "tokens": [1]}]}',
    ],
)
def test_a_damaged_layout_is_refused(training: TrainingTokenizer, tmp_path: Path, content: str) -> None:
    training.save(tmp_path)
    (tmp_path / "training_tokenizer.json").write_text(content)
    with pytest.raises(TokenizerUnusable, match=r"training_tokenizer\.json"):
        TrainingTokenizer.load(tmp_path)


def check_auto_tokenizer(training: TrainingTokenizer, folder: Path) -> None:
    from transformers import AutoTokenizer

    training.save(folder)
    auto = AutoTokenizer.from_pretrained(folder)
    assert auto(TEXT, add_special_tokens=False)["input_ids"] == training.tokenizer.encode_plain(TEXT)
    assert auto.pad_token_id == training.pad_id
    assert auto.eos_token == training.tokenizer.special_tokens.get("eos_token")
    assert len(auto) == training.tokenizer.vocab_size


def test_auto_tokenizer_loads_the_saved_tokenizer_to_the_same_ids(training: TrainingTokenizer, tmp_path: Path) -> None:
    check_auto_tokenizer(training, tmp_path)


def test_saved_tokenizer_keeps_the_flags_of_the_configuration(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    end = {"content": "<|im_end|>", "rstrip": True, "special": True}
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "added_tokens_decoder": {"3993": end}}))
    training = TrainingTokenizer.load(tmp_path / "model", pad="<|pad|>")
    training.save(tmp_path / "saved")
    spaced = "x<|im_end|>  y"
    again = TrainingTokenizer.load(tmp_path / "saved").tokenizer
    assert again.encode_plain(spaced) == training.tokenizer.encode_plain(spaced)
    assert again.encode_plain(spaced) == again.encode_plain("x<|im_end|>y")


def test_new_tokens_follow_those_that_only_the_configuration_adds(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    decoder = {"added_tokens_decoder": {"4000": {"content": "<extra>", "normalized": False}}}
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **decoder}))
    training = TrainingTokenizer.load(tmp_path / "model", pad="<|pad|>").with_block("item", ["<|item_0|>"])
    ids = training.tokenizer.encode_plain("<extra><|pad|><|item_0|>")
    assert ids == [4000, 4001, 4002]
    training.check_ids(np.array(ids, np.int32))
    check_auto_tokenizer(training, tmp_path / "saved")
    assert prove(tmp_path / "model", tmp_path / "saved").ok


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("family", REAL_FAMILIES or [""])
def test_auto_tokenizer_loads_real_tokenizers_to_the_same_ids(family: str, tmp_path: Path) -> None:
    made = TrainingTokenizer.load(model_path(family), pad="<|pad|>").with_block("item", codebook("item", [4, 4, 4]))
    assert made.vocab_size % 64 == 0
    check_auto_tokenizer(made, tmp_path)
