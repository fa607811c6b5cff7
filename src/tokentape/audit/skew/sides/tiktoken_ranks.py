"""A side that is a file of tiktoken ranks, run by tiktoken itself.

Such a file holds neither the expression that splits text nor the control tokens: the expression is named, the control
tokens are those of a tokenizer_config.json beside it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokentape.audit.skew.known_parts import SPLITS
from tokentape.audit.skew.sides.base import Ability, BackendToken, Rendering, SideFacts, SkewChat
from tokentape.audit.skew.sides.from_spec import SideOptions, find_template, hash_file, read_config, special_tokens_of
from tokentape.chat.template import ChatTemplate, plain_message
from tokentape.errors import InvalidRequest, TemplateRefused, TokenizerUnusable

_O200K_RANKS = 190_000
"""Files with more ranks than this are split as o200k_base is unless another split is named."""


class TiktokenSide:
    """tiktoken on a file of ranks. `split` names one of `known_parts.SPLITS`; empty takes one by the file's size."""

    def __init__(self, name: str, path: Path, split: str, options: SideOptions) -> None:
        try:
            import tiktoken
        except ImportError:
            raise TokenizerUnusable("tiktoken is not installed; run: pip install 'tokentape[audit]'") from None
        file = path / "tiktoken.model" if path.is_dir() else path
        ranks = read_ranks(file)
        assumed = not split
        split = split or ("o200k_base" if len(ranks) > _O200K_RANKS else "cl100k_base")
        if split not in SPLITS or len(SPLITS[split]) > 1:
            known = ", ".join(one for one, expressions in SPLITS.items() if len(expressions) == 1)
            raise InvalidRequest(f"tiktoken takes one expression to split by; known are {known}, found {split!r}")
        config = read_config(file.parent)
        added = {
            token["content"]: BackendToken(int(number), token["content"], bool(token.get("special", True)))
            for number, token in config.get("added_tokens_decoder", {}).items()
        }
        try:
            self._encoding: Any = tiktoken.Encoding(
                name=file.name,
                pat_str=SPLITS[split][0],
                mergeable_ranks=ranks,
                special_tokens={token.content: token.id for token in added.values()},
            )
        except Exception as error:  # of its Rust core, which has no narrower kinds
            raise TokenizerUnusable(f"tiktoken does not take {file}: {error}") from error
        self._file, self._split, self._options = file, split, options
        self._template: ChatTemplate | None = find_template(file.parent, config, options)
        special_tokens = special_tokens_of(config)
        self._variables = {**special_tokens, **options.kwargs}
        abilities: set[Ability] = {"decode"}
        if added:
            abilities |= {"controls"}
        if self._template is not None:
            abilities |= {"render"}
        notes = [f"the split is taken to be that of {split}; name another with #NAME"] if assumed else []
        self.facts = SideFacts(
            name=name,
            kind="tiktoken ranks",
            abilities=frozenset(abilities),
            versions={"tiktoken": version("tiktoken")},
            files={file.name: hash_file(file)},
            added=added,
            vocab_size=self._encoding.n_vocab,
            template=self._template.source if self._template else None,
            template_variables=self._variables,
            special_tokens=special_tokens,
            notes=tuple(notes),
        )

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """See `Side`. tiktoken puts nothing around a text."""
        found: list[list[int]] = self._encoding.encode_batch(list(texts), num_threads=1, allowed_special="all")
        return found

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """See `Side`."""
        return [self._encoding.decode(list(ids)) for ids in sequences]

    def render(self, conversation: SkewChat) -> Rendering:
        """See `Side`."""
        if self._template is None:
            raise TemplateRefused("there is no chat template beside the ranks")
        text = self._template.render(
            [plain_message(message) for message in conversation.messages],
            tools=conversation.tools,
            add_generation_prompt=conversation.generate,
            date=self._options.day(),
            variables=self._variables,
        )
        return Rendering(self.encode([text])[0], text)

    def token(self, token_id: int) -> str | None:
        """See `Side`."""
        try:
            data: bytes = self._encoding.decode_single_token_bytes(token_id)
        except KeyError:
            return None
        return data.decode("utf-8", "backslashreplace")

    def reopen(self) -> str | None:
        """See `Side`."""
        return f"tiktoken:{self._file}#{self._split}"

    def close(self) -> None:
        """Nothing is held open."""


def read_ranks(path: Path) -> dict[bytes, int]:
    """The tokens of a file of ranks: lines of base64 and a number.

    Raises `TokenizerUnusable` if it is none.
    """
    ranks = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        raise TokenizerUnusable(f"{path} is no file of tiktoken ranks: expected lines of base64 and a number") from None
    return ranks
