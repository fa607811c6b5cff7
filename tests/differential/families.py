"""The templates that are compared, and the tokenizers and settings that each peer gets for them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.chat.conftest import STAND_IN
from tests.data import REAL
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Family:
    """One template and the name that `renderers` has for its class, None where it has none."""

    renderers: str | None
    vllm: tuple[str, str | None]
    """Names of the tool and the reasoning parser that a vLLM server gets on its command line for such a model."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Settings for that parser, which does not read the template."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Added tokens that a peer expects under another name than the tokenizer at hand has."""
    added: tuple[str, ...] = ()
    """Added tokens that the stand-in vocabulary lacks."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    content_of_calls: str | None = ""
    """What a turn that only calls tools has for content; DeepSeek-V3 shows the calls if it is None."""
    end_of_call: str = ""
    """What a model writes after a single call, if the template omits it."""
    contextual: bool = False
    """The certificate needs the real conversation before the turn."""


_LLAMA = Family(
    "llama-3",
    ("llama3_json", None),
    renamed={"<|reserved_special_token_4|>": "<|eom_id|>", "<|reserved_special_token_5|>": "<|python_tag|>"},
)
_MINIMAX = ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>")

FAMILIES = {
    "qwen2_5/templates/Qwen2.5-Instruct.jinja": Family(None, ("hermes", None)),
    "qwen3/templates/QwQ-32B.jinja": Family(None, ("hermes", None)),
    "qwen3/templates/Qwen3.jinja": Family("qwen3", ("hermes", "qwen3")),
    "qwen3/templates/Qwen3-Apr2025.jinja": Family("qwen3", ("hermes", "qwen3")),
    "qwen3/templates/Qwen3-Coder.jinja": Family(None, ("qwen3_coder", None)),
    "qwen3/templates/Qwen3-Instruct-2507.jinja": Family("qwen3", ("hermes", None)),
    "qwen3/templates/Qwen3-Thinking-2507.jinja": Family("qwen3", ("hermes", "qwen3")),
    "qwen3/templates/Qwen3-VL.jinja": Family("qwen3-vl", ("hermes", None)),
    "qwen3/templates/fixed-trl-qwen3_training.jinja": Family("qwen3", ("hermes", "qwen3")),
    "qwen3_5/templates/Qwen3.5-nothink.jinja": Family(
        None, ("qwen3_coder", "qwen3"), kwargs={"enable_thinking": False}
    ),
    "qwen3_5/templates/Qwen3.5-think.jinja": Family("qwen3.5", ("qwen3_coder", "qwen3")),
    "qwen3_5/templates/Qwen3.6.jinja": Family("qwen3.6", ("qwen3_coder", "qwen3")),
    "qwen3_5/templates/Qwen3.8.jinja": Family("qwen3.8", ("qwen3_coder", "qwen3")),
    "glm4_5/templates/GLM-4.5.jinja": Family("glm-4.5", ("glm45", "glm45")),
    "glm4_5/templates/GLM-4.6.jinja": Family("glm-4.5", ("glm45", "glm45")),
    "glm4_5/templates/GLM-4.7-Flash.jinja": Family("glm-5", ("glm47", "glm47")),
    "gpt_oss/templates/gpt-oss.jinja": Family("gpt-oss", ("openai", "openai_gptoss")),
    "llama3/templates/Llama-3.1-3.3-Instruct.jinja": _LLAMA,
    "llama3/templates/Llama-3.2-Instruct.jinja": _LLAMA,
    "deepseek_v3/templates/DeepSeek-V3-Dec2024.jinja": Family(
        "deepseek-v3",
        ("deepseek_v3", None),
        content_of_calls=None,
        end_of_call="<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        contextual=True,
    ),
    "deepseek_v31/templates/DeepSeek-R1.jinja": Family("deepseek-r1", ("deepseek_v3", "deepseek_r1"), contextual=True),
    "deepseek_v31/templates/DeepSeek-V3.1.jinja": Family(None, ("deepseek_v31", "deepseek_v3")),
    "nemotron3/templates/Nemotron-3-Nano.jinja": Family("nemotron-3", ("qwen3_coder", "nemotron_v3")),
    "nemotron3/templates/Nemotron-3-Super.jinja": Family("nemotron-3", ("qwen3_coder", "nemotron_v3")),
    "nemotron3/templates/Nemotron-3-Ultra.jinja": Family("nemotron-3-ultra", ("qwen3_coder", "nemotron_v3")),
    "nemotron3/templates/Nemotron-3.5-Lightning.jinja": Family("nemotron-3.5", ("qwen3_coder", "nemotron_v3")),
    "minimax_m2/templates/MiniMax-M2.jinja": Family(
        "minimax-m2",
        ("minimax_m2", "minimax_m2"),
        added=_MINIMAX,
        special_tokens={"bos_token": "]~!b[", "eos_token": "[e~["},
    ),
    "mistral_nemo/templates/v13.jinja": Family(
        None, ("mistral", None), renamed={"<SPECIAL_32>": "[ARGS]", "<SPECIAL_33>": "[CALL_ID]"}
    ),
    "mistral_v3_spm/templates/v3_spm.jinja": Family(None, ("mistral", None)),
}


def tokenizer_file(template: str, scratch: Path) -> Path:
    """The tokenizer.json that both sides load: the family's own, or one made from it in `scratch`."""
    family = FAMILIES[template]
    path = REAL / template.split("/")[0] / "tokenizer.json"
    if not path.exists():
        path = REAL / STAND_IN / "tokenizer.json"
    if not family.renamed and not family.added:
        return path
    made = scratch / f"{template.split('/')[0]}.json"
    if not made.exists():
        spec = json.loads(path.read_bytes())
        for token in spec["added_tokens"]:
            token["content"] = family.renamed.get(token["content"], token["content"])
        vocab = spec["model"]["vocab"]
        spec["model"]["vocab"] = {family.renamed.get(piece, piece): token_id for piece, token_id in vocab.items()}
        following = 1 + max(token["id"] for token in spec["added_tokens"])
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
        spec["added_tokens"] += [{"id": following + n, "content": c, **flags} for n, c in enumerate(family.added)]
        made.write_text(json.dumps(spec), encoding="utf-8")
    return made


@cache
def load(template: str, scratch: Path) -> Renderer:
    """Our renderer on the very files that the peers get."""
    path = tokenizer_file(template, scratch)
    config_path = REAL / template.split("/")[0] / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(config_path.read_bytes()) if config_path.exists() else {}
    if not config:
        config = json.loads((REAL / STAND_IN / "tokenizer_config.json").read_bytes())
    tokenizer = Tokenizer(path.read_bytes(), config | FAMILIES[template].special_tokens)
    return Renderer(tokenizer, ChatTemplate((REAL / template).read_text(encoding="utf-8")))


def write_harmony_vocabulary(folder: Path) -> None:
    """Write the vocabulary file that openai-harmony would download, from gpt-oss's tokenizer.json.

    Harmony checks its hash, so it is the original byte for byte or not taken.
    """
    byte_of = _bytes_of_characters()
    vocab = json.loads((REAL / "gpt_oss" / "tokenizer.json").read_bytes())["model"]["vocab"]
    with (folder / "o200k_base.tiktoken").open("wb") as file:
        for piece, rank in sorted(vocab.items(), key=lambda item: item[1]):
            file.write(base64.b64encode(bytes(byte_of[char] for char in piece)) + b" %d\n" % rank)


def _bytes_of_characters() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(rest)}
