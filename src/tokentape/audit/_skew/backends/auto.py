"""The backend that loads a folder with transformers' AutoTokenizer, as most trainers do."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokentape.audit._model_files import max_length, model_configuration
from tokentape.audit._skew import backends
from tokentape.audit._skew.backends.spec import added_of, hashes, makes_masks
from tokentape.chat._template import plain_message, read_source
from tokentape.chat._tokenizer_files import is_refusal, refuse_short_merges
from tokentape.errors import TemplateRefused, TokenizerUnusable

_FLAGS = ("content", "special", "lstrip", "rstrip", "normalized", "single_word")


class AutoBackend(backends.Backend):
    """Runs AutoTokenizer on a local folder, without running code in the folder and without downloads."""

    use_fast = True

    def __init__(self, name: str, path: str, options: backends.BackendOptions) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise TokenizerUnusable("transformers is not installed; run: pip install 'tokentape[hf]'") from None
        if (file := Path(path) / "tokenizer.json").is_file():
            refuse_short_merges(file.read_text(encoding="utf-8", errors="replace"))
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                path, use_fast=self.use_fast, local_files_only=True, trust_remote_code=False
            )
        except BaseException as error:  # transformers raises the errors of its tokenizers and files
            if not is_refusal(error):
                raise
            raise TokenizerUnusable(f"AutoTokenizer can't load {path}: {type(error).__name__}: {error}") from error
        if options.template is not None:
            tokenizer.chat_template = read_source(options.template)
        self._tokenizer, self._options, self.reopened_as = tokenizer, options, name
        spec = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else None
        variants = tokenizer.chat_template
        variants = variants if isinstance(variants, dict) else {"default": variants}
        template = variants.get("default")
        other_templates = {key: source for key, source in variants.items() if key not in ("default", "tool_use")}
        abilities: set[backends.Ability] = {"special", "decode", "controls"}
        if template is not None:
            abilities |= {"render", "mask"} if makes_masks(template) and spec is not None else {"render"}
        special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        decoder = {} if spec is not None else tokenizer.added_tokens_decoder
        listed = [
            backends.BackendToken(number, *(getattr(token, flag) for flag in _FLAGS))
            for number, token in decoder.items()
        ]
        self.facts = backends.BackendFacts(
            name=name,
            kind=f"AutoTokenizer {type(tokenizer).__name__}",
            abilities=frozenset(abilities),
            versions={"transformers": version("transformers"), "tokenizers": version("tokenizers")},
            files=hashes(Path(path)),
            spec=spec,
            added=added_of(spec) if spec is not None else {token.content: token for token in listed},
            vocab_size=len(tokenizer),
            template=template,
            tool_template=variants.get("tool_use"),
            templates=None if options.template is not None else other_templates,
            configuration=model_configuration(Path(path)),
            max_length=max_length(Path(path)),
            template_variables={**special_tokens, **options.kwargs},
            special_tokens=special_tokens,
            cleans_up=bool(tokenizer.clean_up_tokenization_spaces),
            notes=("templates use this machine's date, not the passed date",) if options.date is not None else (),
        )

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False
        )["input_ids"]
        return ids

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return [self._tokenizer.decode(list(ids), skip_special_tokens=False) for ids in sequences]

    def render(self, conversation: backends.SkewChat) -> backends.Rendering:
        """See `Backend`. Text parts are joined, as servers and trainers do before a template sees them."""
        plain = [(message, plain_message(message)) for message in conversation.messages]
        messages = [{key: value for key, value in flat.items() if key in message} for message, flat in plain]
        arguments = {
            "tools": list(conversation.tools) or None,
            "add_generation_prompt": conversation.generate,
            **self._options.kwargs,
        }
        masked = "mask" in self.facts.abilities
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
            out = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=masked, **arguments
            )
        except Exception as error:  # a template raises any error
            raise TemplateRefused(f"apply_chat_template failed: {type(error).__name__}") from error
        return backends.Rendering(
            out["input_ids"], text, [bool(flag) for flag in out["assistant_masks"]] if masked else None
        )

    def token(self, token_id: int) -> str | None:
        spelling: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return spelling


def same_tokenizer(a: AutoBackend, b: AutoBackend) -> bool:
    """Return True if transformers loaded equal tokenizers (parts and settings) from two folders."""
    spec_a, spec_b = ({**(side.facts.spec or {}), "truncation": None, "padding": None} for side in (a, b))
    names = ("special_tokens", "cleans_up", "vocab_size")
    switches = [[getattr(side.facts, name) for name in names] for side in (a, b)]
    splits = [side._tokenizer.split_special_tokens for side in (a, b)]
    return a.facts.spec is not None and spec_a == spec_b and switches[0] == switches[1] and splits[0] == splits[1]


def unlike_sides(a: AutoBackend, b: AutoBackend) -> list[str]:
    """Describe differences in the sides on which transformers pads and truncates for two folders."""
    names = ("padding_side", "truncation_side")
    sides = [(name, getattr(a._tokenizer, name), getattr(b._tokenizer, name)) for name in names]
    return [f"{name} is {of_a} in A and {of_b} in B" for name, of_a, of_b in sides if of_a != of_b]


class SlowBackend(AutoBackend):
    """AutoTokenizer with `use_fast=False`."""

    use_fast = False
