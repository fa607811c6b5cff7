"""Train a small tokenizer for a case, and write the model folder that the product loads."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tests.generator.compose import Template
from tests.generator.options import Case

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SYLLABLES = re.findall(r"\w+", "ba de fi go lu ka me ni po ru sa te vi wo xy za ing ion ent ure")
_PHRASES = (
    "the user asks for a place",
    "def f(x):\n    return x + 1\n",
    '{"name": "measure", "arguments": {"place": "here"}}',
    "    indented\n        twice\n",
    "système café 日本語 🫠",
    "# Tools\n\n- one\n- two\n",
    "<b>bold</b> and <br> more",
    "Today is 26 July 2024.\n\n",
    "a  b   c    d",
    "\tif a < b:\n\t\tpass\n",
    "assistant user system tool call result",
    "im_start im_end end_of_turn",
)
_MARKUP = ("<tool_call>\n", "<think>\n", "[/THINK]", "</tool_call>", "<|im_end|>\n")
"""Text in which control tokens are spelled: pieces of a vocabulary may then spell them too."""
HTML = ("<b>", "</b>", "<br>", "<table>")
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def lines(rng: random.Random, count: int = 300, *, markup: bool = False) -> Iterator[str]:
    """Text to train on: made-up words, code, JSON, runs of spaces, other scripts; `markup`: control tokens spelled."""
    phrases = _PHRASES + (_MARKUP if markup else ())
    words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(120)]
    for _ in range(count):
        yield " ".join(rng.choices(words, k=8)) + " " + rng.choice(phrases) + rng.choice(phrases)


def _trained(case: Case, first: Sequence[str]) -> dict[str, Any]:
    """tokenizer.json of a tokenizer trained for the case, with the tokens `first` at the lowest ids."""
    rng = case.random("vocabulary")
    kind, size = case.options["vocabulary"], rng.randint(450, 900)
    specials = [tokenizers.AddedToken(token, normalized=False) for token in first]
    if kind.startswith("byte_level"):
        tokenizer = tokenizers.Tokenizer(models.BPE())
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "byte_level")
        split = pre_tokenizers.Split(tokenizers.Regex(_SPLIT), "isolated")
        tokenizer.pre_tokenizer = byte_level if kind == "byte_level" else pre_tokenizers.Sequence([split, byte_level])
        if case.options["normal_form"] == "nfc":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    elif kind.startswith("bpe"):
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        replace = normalizers.Replace(" ", "▁")
        prefix = kind == "bpe_prefix"
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
        # Pieces are learned within words and runs of spaces, as SentencePiece learns them; encoding splits nothing.
        # Runs that are separate tokens (user-defined symbols) are learned separately from words.
        runs = case.options["spaces"] == "underline_runs"
        split = tokenizers.Regex("▁?[^▁\n]+|▁+|\n+" if runs else "▁*[^▁\n]+|▁+|\n+")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(split, "isolated")
        trainer = trainers.BpeTrainer(
            vocab_size=size + 256, special_tokens=[*specials, "<unk>", *_BYTES], show_progress=False
        )
    else:
        tokenizer = tokenizers.Tokenizer(models.Unigram())
        scheme = "always" if kind == "unigram_prefix" else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.UnigramTrainer(
            vocab_size=size,
            special_tokens=[*specials, "<unk>"],
            unk_token="<unk>",
            show_progress=False,
            initial_alphabet=[chr(code) for code in range(0x21, 0x7F)] + list("\n\té日本語🫠\u0301｜"),
        )
    tokenizer.train_from_iterator(lines(rng, markup=case.options["trained_on"] == "markup"), trainer)
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    if kind.startswith("bpe"):
        spec["pre_tokenizer"] = None
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in _BYTES]
    return spec


def tokenizer_json(case: Case, template: Template) -> dict[str, Any]:
    """A tokenizer.json with the template's control tokens and the case's options."""
    on, rng = case.options, case.random("tokens")
    # transformers adds the tokens that a configuration names to a vocabulary that lacks them.
    kept = (template.eos, template.bos, *template.other_ends)
    controls = [token for token in template.controls if token in kept or not _left_as_text(case, token)]
    spec = _trained(case, controls if on["placement"] == "front" else [])
    vocab = spec["model"]["vocab"]
    known = dict(vocab) if isinstance(vocab, Mapping) else {piece: n for n, (piece, _) in enumerate(vocab)}
    added = {token["content"]: token for token in spec["added_tokens"]}
    wanted = {token: token not in template.plain for token in controls}
    if on["flags"] == "mixed":
        # Tags and what frames calls are often no special tokens; what begins messages is mostly one, what ends them is.
        share = {token: 0.25 if token.startswith(("<|", "<｜")) else 0.7 for token in controls if token not in kept}
        wanted |= {token: False for token, chance in share.items() if rng.random() < chance}
    if on["html"] == "tags":
        wanted |= {token: False for token in HTML if token not in wanted}
    space = {"plain_runs": " ", "underline_runs": "▁"}.get(on["spaces"])
    if space is not None:
        wanted |= {space * n: False for n in range(2, rng.choice((5, 17, 32)))}
        wanted |= {"\n" * n: False for n in range(2, 4)}
    top = max(known.values()) + 1
    for content, special in wanted.items():
        token_id = known.get(content)
        if token_id is None:
            token_id, top = top, top + 1
        added[content] = {
            "id": token_id,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": on["flags"] == "strip_right" and special and rng.random() < 0.3,
            "normalized": False,
            "special": special,
        }
    spec["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
    return spec


def _left_as_text(case: Case, token: str) -> bool:
    """Whether the vocabulary lacks the tags that the template writes like tokens, so that they are spelled out."""
    bare = case.options["flags"] == "mixed" and not token.startswith(("<|", "<｜", "<s"))
    return bare and case.random(f"text {token}").random() < 0.2


def write_model(case: Case, template: Template, folder: Path) -> Path:
    """Write the files of a model folder and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = tokenizer_json(case, template)
    ids = {token["content"]: token["id"] for token in spec["added_tokens"]}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": template.bos, "eos_token": template.eos}
    eos = [template.eos, *(template.other_ends if case.options["eos_list"] == "several" else ())]
    generation = {"eos_token_id": [ids[token] for token in eos if token in ids]}
    (folder / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template.source, encoding="utf-8")
    return folder
