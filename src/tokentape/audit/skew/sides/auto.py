"""A side that is what transformers' AutoTokenizer makes of a folder: what most trainers run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokentape.audit.skew.sides.base import Ability, BackendToken, Rendering, SideFacts, SkewChat
from tokentape.audit.skew.sides.from_spec import SideOptions, added_of, hashes, makes_masks, special_tokens_of
from tokentape.chat.template import plain_message, read_source
from tokentape.errors import TemplateRefused, TokenizerUnusable


class AutoSide:
    """AutoTokenizer on a folder of this machine. Code in the folder is never run, nothing is downloaded."""

    def __init__(self, name: str, folder: Path, options: SideOptions, *, use_fast: bool = True) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise TokenizerUnusable("transformers is not installed; run: pip install 'tokentape[hf]'") from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, use_fast=use_fast, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises what its tokenizers and files happen to raise
            raise TokenizerUnusable(f"AutoTokenizer can't load {folder}: {type(error).__name__}: {error}") from error
        if options.template is not None:
            self._tokenizer.chat_template = read_source(options.template)
        self._options = options
        self._name = name
        spec = json.loads(self._tokenizer.backend_tokenizer.to_str()) if self._tokenizer.is_fast else None
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        abilities: set[Ability] = {"special", "decode", "controls"}
        if template is not None:
            abilities.add("render")
            if makes_masks(template) and spec is not None:
                abilities.add("mask")
        notes = ["templates are shown the date of this machine's clock"] if options.date is not None else []
        special_tokens = special_tokens_of({k: str(v) for k, v in self._tokenizer.special_tokens_map.items()})
        self.facts = SideFacts(
            name=name,
            kind=f"AutoTokenizer {type(self._tokenizer).__name__}",
            abilities=frozenset(abilities),
            versions={"transformers": version("transformers"), "tokenizers": version("tokenizers")},
            files=hashes(folder),
            spec=spec,
            added=added_of(spec) if spec is not None else self._added(),
            vocab_size=len(self._tokenizer),
            template=template,
            template_variables={**special_tokens, **options.kwargs},
            special_tokens=special_tokens,
            cleans_up=bool(self._tokenizer.clean_up_tokenization_spaces),
            notes=tuple(notes),
        )

    def _added(self) -> dict[str, BackendToken]:
        found = self._tokenizer.added_tokens_decoder
        return {
            token.content: BackendToken(
                number, token.content, token.special, token.lstrip, token.rstrip, token.normalized, token.single_word
            )
            for number, token in found.items()
        }

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """See `Side`."""
        found: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False
        )["input_ids"]
        return found

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """See `Side`."""
        return [self._tokenizer.decode(list(ids), skip_special_tokens=False) for ids in sequences]

    def render(self, conversation: SkewChat) -> Rendering:
        """See `Side`."""
        messages = [_sent(message) for message in conversation.messages]
        asked = {
            "tools": list(conversation.tools) or None,
            "add_generation_prompt": conversation.generate,
            **self._options.kwargs,
        }
        masked = "mask" in self.facts.abilities
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **asked)
            out = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=masked, **asked
            )
        except Exception as error:  # a template raises what it likes
            raise TemplateRefused(f"apply_chat_template failed: {type(error).__name__}") from error
        return Rendering(out["input_ids"], text, [bool(one) for one in out["assistant_masks"]] if masked else None)

    def token(self, token_id: int) -> str | None:
        """See `Side`."""
        found: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return found

    def reopen(self) -> str | None:
        """See `Side`."""
        return self._name

    def close(self) -> None:
        """Nothing is held open."""


def _sent(message: Any) -> dict[str, Any]:
    """The message with text parts joined, as servers and trainers do before a template sees it."""
    plain = plain_message(message)
    return {key: value for key, value in plain.items() if key in message}
