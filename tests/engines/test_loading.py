from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")

from tokentape.engines import _loading as loading  # noqa: E402
from tokentape.errors import EngineError, TokenizerUnusable  # noqa: E402

MakeModel = Callable[..., Path]


@pytest.fixture
def model(untrained_dir: Path) -> Any:
    return loading.load_model(untrained_dir, dtype="float32", device="cpu")


def test_full_attention_decoder_is_accepted(model: Any) -> None:
    loading.refuse_unbatchable(model, dtype="float32")


def test_half_precision_decoder_is_accepted(untrained_dir: Path) -> None:
    model = loading.load_model(untrained_dir, dtype="bfloat16", device="cpu")
    loading.refuse_unbatchable(model, dtype="bfloat16")


def test_sliding_attention_is_refused_by_name(make_model: MakeModel) -> None:
    folder = make_model(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    model = loading.load_model(folder, dtype="float32", device="cpu")
    with pytest.raises(EngineError, match="DynamicSlidingWindowLayer"):
        loading.refuse_unbatchable(model, dtype="float32")


def test_a_model_that_ignores_padding_is_refused(model: Any) -> None:
    def without_mask(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | {"attention_mask": torch.ones_like(kwargs["attention_mask"])}

    model.register_forward_pre_hook(without_mask, with_kwargs=True)
    with pytest.raises(EngineError, match="different logprobs in a padded batch"):
        loading.refuse_unbatchable(model, dtype="float32")


def test_a_model_that_takes_no_position_ids_is_refused(model: Any) -> None:
    def broken(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        raise TypeError("unexpected keyword argument 'position_ids'")

    model.register_forward_pre_hook(broken, with_kwargs=True)
    with pytest.raises(EngineError, match="position_ids"):
        loading.refuse_unbatchable(model, dtype="float32")


def test_padding_rows_of_the_embedding_are_not_valid_ids(model: Any, tokenizer: Tokenizer) -> None:
    known = loading.known_ids(tokenizer, model)
    assert len(known) == model.config.vocab_size > tokenizer.get_vocab_size()
    assert known.nonzero()[0].tolist() == list(range(tokenizer.get_vocab_size()))


def test_tokens_without_an_embedding_are_not_valid_ids(make_model: MakeModel, tokenizer: Tokenizer) -> None:
    model = loading.load_model(make_model(vocab_size=100), dtype="float32", device="cpu")
    assert loading.known_ids(tokenizer, model).tolist() == [True] * 100


def test_a_config_without_a_context_limit_is_refused() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=1))
    with pytest.raises(EngineError, match="max_context"):
        loading.context_limit(model)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json"):
        loading.load_model(tmp_path, dtype="float32", device="cpu")


def test_a_folder_without_weights_is_refused(untrained_dir: Path, tmp_path: Path) -> None:
    shutil.copy(untrained_dir / "config.json", tmp_path)
    with pytest.raises(EngineError, match="can't load"):
        loading.load_model(tmp_path, dtype="float32", device="cpu")


def test_an_unknown_dtype_is_refused(untrained_dir: Path) -> None:
    with pytest.raises(EngineError, match="float8"):
        loading.load_model(untrained_dir, dtype="float8", device="cpu")


@pytest.mark.parametrize("device", ["cuda:77", "meta", "privateuseone"])
def test_a_device_that_can_not_compute_is_refused(untrained_dir: Path, device: str) -> None:
    with pytest.raises(EngineError, match=rf"can't be moved to device '{device}'.*try device 'cpu'"):
        loading.load_model(untrained_dir, dtype="float32", device=device)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerUnusable, match=r"no tokenizer\.json"):
        loading.load_tokenizer(tmp_path)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerUnusable, match="can't be read"):
        loading.load_tokenizer(tmp_path)
