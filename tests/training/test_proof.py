"""Proofs that hold for tokenizers of `TrainingTokenizer`, and fail for each way to change a byte path."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.chat.conftest import REAL_FAMILIES, model_path
from tests.data import REAL
from tokentape.errors import InvalidRequest
from tokentape.training._proof import PARTS, prove
from tokentape.training._tokenizer import TrainingTokenizer, codebook


@pytest.fixture(scope="session")
def training(model_dir: Path) -> TrainingTokenizer:
    return TrainingTokenizer.load(model_dir, pad="<|pad|>").with_block("item", codebook("item", [8, 8]))


def test_extended_tokenizer_keeps_the_byte_path(model_dir: Path, training: TrainingTokenizer) -> None:
    files = (Path(__file__).parents[1] / "chat").glob("test_b*.py")
    proof = prove(model_dir, training, ["some text of mine", *files])
    assert proof.ok
    assert proof.texts > 1500
    assert proof.fingerprint == prove(model_dir, model_dir).fingerprint
    # Kept by users: the digest of the parts' digests.
    spec = json.loads((model_dir / "tokenizer.json").read_bytes())
    digests = {part: sha256(json.dumps(spec.get(part)).encode()).hexdigest() for part in PARTS}
    assert proof.fingerprint == sha256(json.dumps(digests).encode()).hexdigest()


def test_text_that_spells_a_new_token_is_reported_and_minimized(
    model_dir: Path, training: TrainingTokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "corpus.txt"
    file.write_text("harmless text\n" * 2500 + "and then <|item_0_1|> here\n" + "more\n" * 10, encoding="utf-8")
    proof = prove(model_dir, training, [file])
    assert not proof.ok
    assert proof.changed_texts == 1
    assert proof.counterexample is not None
    assert (proof.counterexample.text, proof.counterexample.source) == ("<|item_0_1|>", str(file))
    assert proof.counterexample.new_ids == (training.block("item").first_id + 1,)


def other_normalizer(spec: dict[str, Any]) -> None:
    spec["normalizer"] = None


def other_model(spec: dict[str, Any]) -> None:
    spec["model"]["merges"] = spec["model"]["merges"][:-1]


def other_decoder(spec: dict[str, Any]) -> None:
    spec["decoder"] = None


def other_flags(spec: dict[str, Any]) -> None:
    next(token for token in spec["added_tokens"] if token["content"] == "<|im_end|>")["rstrip"] = True


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("touch", "part", "changes_ids", "changes_text"),
    [
        pytest.param(other_normalizer, "normalizer", True, False, marks=pytest.mark.slow),
        pytest.param(other_model, "model", True, False, marks=pytest.mark.slow),
        (other_decoder, "decoder", False, True),
        (other_flags, "added token '<|im_end|>'", True, False),
    ],
)
def test_changed_parts_are_named_and_the_battery_shows_their_effect(
    model_dir: Path,
    tmp_path: Path,
    touch: Callable[[dict[str, Any]], None],
    part: str,
    changes_ids: bool,
    changes_text: bool,
) -> None:
    spec = json.loads((model_dir / "tokenizer.json").read_bytes())
    touch(spec)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    proof = prove(model_dir, tmp_path)
    assert proof.changed_parts == (part,)
    assert (proof.changed_texts > 0, len(proof.changed_spellings) > 0) == (changes_ids, changes_text)
    assert (proof.counterexample is not None) == changes_ids


def test_a_folder_without_a_tokenizer_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        prove(model_dir, tmp_path)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("family", REAL_FAMILIES or [""])
def test_real_tokenizers_keep_their_byte_path(family: str) -> None:
    made = TrainingTokenizer.load(model_path(family), pad="<|pad|>").with_block(
        "item", codebook("item", [256, 256, 256])
    )
    assert prove(model_path(family), made, (REAL / "goldens").glob("*_input.txt")).ok
