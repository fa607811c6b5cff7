"""The backend of SentencePiece models, and what the file of such a model says."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokentape.audit._skew.backends.base import Backend, BackendFacts, BackendToken
from tokentape.audit._skew.backends.spec import BackendOptions, hash_file, require
from tokentape.errors import TokenizerUnusable

_FIELDS = {"pieces": 1, "settings": 2, "normalizer": 3}
"""Fields of SentencePiece's ModelProto (sentencepiece_model.proto) by the names of tables."""
_SETTINGS: Mapping[int, tuple[str, Any]] = {
    3: ("model_type", 1),
    24: ("treat_whitespace_as_suffix", 0),
    35: ("byte_fallback", 0),
    40: ("unk_id", 0),
    41: ("bos_id", 1),
    42: ("eos_id", 2),
    43: ("pad_id", 2**64 - 1),
    44: ("unk_surface", " \u2047 ".encode()),
    45: ("unk_piece", b"<unk>"),
    46: ("bos_piece", b"<s>"),
    47: ("eos_piece", b"</s>"),
    48: ("pad_piece", b"<pad>"),
}
_NORMALIZER: Mapping[int, tuple[str, Any]] = {
    2: ("precompiled_charsmap", b""),
    3: ("add_dummy_prefix", 1),
    4: ("remove_extra_whitespaces", 1),
    5: ("escape_whitespaces", 1),
}
"""Names and defaults of the fields of TrainerSpec and NormalizerSpec that change ids or text, by number."""
_TYPES = ("", "normal", "unknown", "control", "user-defined", "unused", "byte")
_LONGEST = 40


class SentencePieceBackend(Backend):
    """Runs `sentencepiece` on a model file. It encodes control tokens in text as text, and has no chat template."""

    def __init__(self, name: str, path: str, options: BackendOptions) -> None:
        file = Path(path) / "tokenizer.model" if Path(path).is_dir() else Path(path)
        try:
            model: Any = require("sentencepiece").SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise TokenizerUnusable(f"sentencepiece can't load {file}: {error}") from None
        self._model, self.reopened_as, self._data = model, f"spm:{file}", file.read_bytes()
        controls = [number for number in range(model.vocab_size()) if model.is_control(number)]
        ends = {f"{which}_token": getattr(model, f"{which}_id")() for which in ("bos", "eos", "pad", "unk")}
        self.facts = BackendFacts(
            name=name,
            kind="SentencePiece model",
            abilities=frozenset({"decode"}),
            versions={"sentencepiece": version("sentencepiece")},
            files={file.name: hash_file(file)},
            tables=model_tables(self._data),
            added={model.id_to_piece(number): BackendToken(number, model.id_to_piece(number)) for number in controls},
            vocab_size=model.vocab_size(),
            special_tokens={key: model.id_to_piece(number) for key, number in ends.items() if number >= 0},
            notes=("SentencePiece reads control tokens in text as text",),
        )

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        found: list[list[int]] = self._model.encode(list(texts), out_type=int, add_bos=special, add_eos=False)
        return found

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return [self._model.decode(list(ids)) for ids in sequences]

    def with_tables(self, names: Collection[str], other: Backend) -> Callable[[Sequence[str]], list[list[int]]] | None:
        """See `Backend`."""
        if not isinstance(other, SentencePieceBackend):
            return None
        taken = {_FIELDS[name] for name in names}
        kept = [raw for number, _, raw in _fields(self._data) if number not in taken]
        kept += [raw for number, _, raw in _fields(other._data) if number in taken]
        try:
            model = require("sentencepiece").SentencePieceProcessor(model_proto=b"".join(kept))
        except (OSError, RuntimeError):
            return None
        return partial(_encode, model)

    def token(self, token_id: int) -> str | None:
        return str(self._model.id_to_piece(token_id)) if 0 <= token_id < self._model.vocab_size() else None


def _encode(model: Any, texts: Sequence[str]) -> list[list[int]]:
    found: list[list[int]] = model.encode(list(texts), out_type=int)
    return found


def model_tables(data: bytes) -> dict[str, dict[str, Any]]:
    """Return pieces, settings and normalizer of a SentencePiece model. Raises `TokenizerUnusable` if it is damaged."""
    pieces: dict[str, Any] = {}
    found = {"settings": dict(_SETTINGS.values()), "normalizer": dict(_NORMALIZER.values())}
    tables = {2: ("settings", _SETTINGS), 3: ("normalizer", _NORMALIZER)}
    try:
        for number, value, _ in _fields(data):
            if number == 1:
                one = {key: part for key, part, _ in _fields(value)}
                score = struct.unpack("<f", one.get(2, bytes(4)))[0]
                pieces[one[1].decode()] = (len(pieces), round(score, 6), _TYPES[one.get(3, 1)])
            elif number in tables:
                name, known = tables[number]
                found[name] |= {known[key][0]: part for key, part, _ in _fields(value) if key in known}
    except (LookupError, TypeError, ValueError, struct.error) as error:
        raise TokenizerUnusable(f"this is no SentencePiece model: {error}") from error
    settings = {name: {key: _short(value) for key, value in table.items()} for name, table in found.items()}
    return {"normalizer": settings["normalizer"], "settings": settings["settings"], "pieces": pieces}


def _short(value: Any) -> Any:
    if not isinstance(value, bytes):
        return value
    return value.decode(errors="replace") if len(value) <= _LONGEST else f"SHA-256 {sha256(value).hexdigest()}"


def _fields(data: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """Yield number, value and encoding of each field of a protobuf message."""
    at = 0
    while at < len(data):
        start = at
        key, at = _varint(data, at)
        value: Any
        if key & 7 == 0:
            value, at = _varint(data, at)
        else:
            size, at = _varint(data, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = data[at : at + size], at + size
        yield key >> 3, value, data[start:at]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while data[at] & 0x80:
        number, shift, at = number | (data[at] & 0x7F) << shift, shift + 7, at + 1
    return number | data[at] << shift, at + 1
