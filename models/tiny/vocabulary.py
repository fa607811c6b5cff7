"""The tiny model's tokenizer: byte-level BPE of 4,000 tokens, built as Qwen3's is."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCABULARY_SIZE = 4_000
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
PLAIN_ADDED_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added, but not special, as in Qwen3: they survive `skip_special_tokens`."""

# Words with their leading space or sign, single digits, runs of punctuation, line ends, other white space.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn merges from the texts. Added tokens get the highest ids; their text is cut out before learning."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = (*SPECIAL_TOKENS, *PLAIN_ADDED_TOKENS)
    control = re.compile("|".join(map(re.escape, added)))
    tokenizer.train_from_iterator(
        (piece for text in texts for piece in control.split(text) if piece),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY_SIZE - len(added),
            min_frequency=2,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN_ADDED_TOKENS])
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise RuntimeError(f"{tokenizer.get_vocab_size()} tokens learnt; the corpus is too small for {VOCABULARY_SIZE}")
    return tokenizer


def with_dropout(tokenizer: Tokenizer, probability: float) -> Tokenizer:
    """The same tokenizer, skipping each merge with this probability (BPE dropout, Provilkov et al. 2020)."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.model.dropout = probability
    return copy
