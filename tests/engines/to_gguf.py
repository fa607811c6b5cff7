"""Write the demonstration model, a Qwen3, as GGUF for llama-server.

    python tests/engines/to_gguf.py src/tokentape/demo/model tiny.gguf

Needs the packages `gguf`, `numpy` and `safetensors`. llama.cpp's converter accepts only known tokenizers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
from safetensors.numpy import load_file

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor of a transformers checkpoint."""
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.weight"


def write(model: Path, target: Path) -> None:
    """Convert a model folder; float32 stays float32."""
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(str(target), "qwen3")
    writer.add_name("tokentape-tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])

    tokens = [f"[PAD{index}]" for index in range(config["vocab_size"])]
    kinds = [gguf.TokenType.UNUSED] * len(tokens)
    for token, index in tokenizer["model"]["vocab"].items():
        tokens[index], kinds[index] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], kind
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)

    for name, tensor in load_file(model / "model.safetensors").items():
        writer.add_tensor(gguf_name(name), tensor.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
