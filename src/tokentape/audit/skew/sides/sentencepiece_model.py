"""A side that is a SentencePiece model, run by the library itself."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokentape.audit.skew.sides.base import BackendToken, Rendering, SideFacts, SkewChat
from tokentape.audit.skew.sides.from_spec import SideOptions, hash_file
from tokentape.errors import TemplateRefused, TokenizerUnusable


class SentencePieceSide:
    """`sentencepiece` on a model file. It never reads control tokens in text, and has no chat template."""

    def __init__(self, name: str, path: Path, options: SideOptions) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise TokenizerUnusable("sentencepiece is not installed; run: pip install 'tokentape[audit]'") from None
        file = path / "tokenizer.model" if path.is_dir() else path
        try:
            self._model: Any = SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise TokenizerUnusable(f"sentencepiece can't load {file}: {error}") from None
        self._path = file
        model = self._model
        added = {
            model.id_to_piece(number): BackendToken(number, model.id_to_piece(number))
            for number in range(model.vocab_size())
            if model.is_control(number)
        }
        ends = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "pad_token": model.pad_id()}
        ends["unk_token"] = model.unk_id()
        self.facts = SideFacts(
            name=name,
            kind="SentencePiece model",
            abilities=frozenset({"decode"}),
            versions={"sentencepiece": version("sentencepiece")},
            files={file.name: hash_file(file)},
            added=added,
            vocab_size=model.vocab_size(),
            special_tokens={key: model.id_to_piece(number) for key, number in ends.items() if number >= 0},
            notes=("SentencePiece reads control tokens in text as text",),
        )

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """See `Side`."""
        found: list[list[int]] = self._model.encode(list(texts), out_type=int, add_bos=special, add_eos=False)
        return found

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """See `Side`."""
        return [self._model.decode(list(ids)) for ids in sequences]

    def render(self, conversation: SkewChat) -> Rendering:
        """See `Side`."""
        raise TemplateRefused("a SentencePiece model has no chat template")

    def token(self, token_id: int) -> str | None:
        """See `Side`."""
        return str(self._model.id_to_piece(token_id)) if 0 <= token_id < self._model.vocab_size() else None

    def reopen(self) -> str | None:
        """See `Side`."""
        return f"spm:{self._path}"

    def close(self) -> None:
        """Nothing is held open."""
