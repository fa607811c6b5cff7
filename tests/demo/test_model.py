"""The shipped model: small, loadable by anything that loads Qwen3, and able to do its tasks."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer

import tokentape.demo
from tokentape.demo.tasks import ITEMS, TOOLS, is_solved, sample_tasks

FOLDER = Path(tokentape.demo.__file__).parent / "model"
SOURCES = Path(__file__).parents[2] / "models" / "tiny"
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

Render = Callable[..., str]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The evaluation script: the loop of prompting, calling tools and answering."""
    monkeypatch.syspath_prepend(str(SOURCES))
    monkeypatch.delitem(sys.modules, "train", raising=False)  # the time limit of an example
    return importlib.import_module("evaluate")


@pytest.fixture
def render(evaluate: ModuleType) -> Render:
    return evaluate.template_renderer((FOLDER / "chat_template.jinja").read_text())  # type: ignore[no-any-return]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": arguments}}


def test_folder_is_complete_and_small() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(sizes) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) <= 5_000_000


def test_config_vocabulary_is_the_tokenizers(tokenizer: Tokenizer) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size() == 4000
    assert config["tie_word_embeddings"]
    assert config["dtype"] == "float32"


def test_stop_ids_are_the_end_of_turn_and_of_text(tokenizer: Tokenizer) -> None:
    stops = json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"]
    assert [tokenizer.id_to_token(stop) for stop in stops] == ["<|im_end|>", "<|endoftext|>"]


def test_only_chat_control_is_special(tokenizer: Tokenizer) -> None:
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert added == {
        **dict.fromkeys(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), True),
        **dict.fromkeys(ADDED, False),
    }


@pytest.mark.parametrize(
    "text",
    ["What is 12 plus 37?", "  spaces\n\n\tand tabs ", "naïve 東京 🙂 ١٢", "it's \r\n{'a': 1}", "<think>x</think>"],
)
def test_tokenizer_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = encode(tokenizer, text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert len(encode(tokenizer, "1234567890")) == 10


def test_items_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert [item for item in ITEMS if len(encode(tokenizer, f" {item}")) > 1] == []


def test_transformers_encodes_like_the_tokenizer_file(tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    text = "<|im_start|>user\nWhat's 12 plus 37?\n\n<tool_call>{}</tool_call> naïve 東京<|im_end|>"
    assert AutoTokenizer.from_pretrained(FOLDER)(text)["input_ids"] == encode(tokenizer, text)


def test_template_renders_a_tool_conversation(render: Render) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "U"}]},
        {"role": "assistant", "content": None, "reasoning_content": "R", "tool_calls": [call({"item": "pears"})] * 2},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
        {"role": "tool", "tool_call_id": "c2", "content": "13"},
    ]
    assert render(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nS<|im_end|>\n"
        "<|im_start|>user\nU<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nR\n</think>\n\n"
        '<tool_call>\n{"name": "lookup", "arguments": {"item": "pears"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "lookup", "arguments": {"item": "pears"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n12\n</tool_response>\n<tool_response>\n13\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_lists_the_tools(render: Render) -> None:
    text = render([{"role": "user", "content": "U"}], tools=TOOLS)
    listed = re.search(r"<tools>\n(.*)\n</tools>", text, flags=re.DOTALL)
    assert listed is not None
    assert [json.loads(line) for line in listed[1].split("\n")] == TOOLS


def test_template_accepts_arguments_as_text_or_object(render: Render) -> None:
    def rendered(arguments: Any) -> str:
        return render([{"role": "user", "content": "U"}, {"role": "assistant", "tool_calls": [call(arguments)]}])

    assert rendered('{"item": "pears"}') == rendered({"item": "pears"})


def test_template_drops_reasoning_once_the_user_speaks_again(render: Render) -> None:
    turn = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A", "reasoning_content": "R"}]
    assert "R" in render(turn)
    assert "R" not in render([*turn, {"role": "user", "content": "V"}])


@pytest.mark.parametrize("count", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_model_solves_heldout_tasks_greedily(evaluate: ModuleType, count: int) -> None:
    tasks = sample_tasks(seed=1, n=count, split="heldout")
    rollouts = evaluate.roll_out(FOLDER, tasks, temperature=0.0)
    assert sum(is_solved(rollout.task, rollout.final_text or "") for rollout in rollouts) >= count - 1


@pytest.mark.slow
def test_model_samples_spellings_that_the_tokenizer_would_not(evaluate: ModuleType, tokenizer: Tokenizer) -> None:
    rollouts = evaluate.roll_out(FOLDER, sample_tasks(seed=1, n=20, split="heldout"), temperature=1.0)
    changed = [any(not evaluate.is_canonical(tokenizer, ids) for ids in rollout.completions) for rollout in rollouts]
    assert sum(changed) >= 4
