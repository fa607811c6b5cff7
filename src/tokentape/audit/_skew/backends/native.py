"""Backends that run models' own libraries: tiktoken, mistral-common and sentencepiece."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokentape.audit._skew import backends
from tokentape.audit._skew.backends.spec import TemplateBackend, find_template, hash_file, require
from tokentape.audit._skew.parts import SPLITS, byte_level
from tokentape.chat._byte_level import byte_piece
from tokentape.chat._tokenizer_files import named_special_tokens, read_json
from tokentape.engines._tokenizing import with_text_arguments
from tokentape.errors import InvalidRequest, TemplateRefused, TokenizerUnusable, UnsupportedParameter

_O200K_RANKS = 190_000
"""Files with more ranks than this use the split of o200k_base, unless the user names a split."""


class MistralBackend(backends.Backend):
    """Runs mistral-common on a file. It encodes control tokens in text as text, and renders without a template."""

    def __init__(self, name: str, path: str, options: backends.BackendOptions) -> None:
        file = Path(path) / "tekken.json" if Path(path).is_dir() else Path(path)
        require("mistral_common")
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

        try:
            self._chat: Any = MistralTokenizer.from_file(str(file))
        except Exception as error:  # the library raises the errors of all its parts
            raise TokenizerUnusable(f"mistral-common can't load {file}: {type(error).__name__}: {error}") from error
        self._tokenizer: Any = self._chat.instruct_tokenizer.tokenizer
        self.reopened_as = f"mistral:{file}"
        added = {}
        for number in range(self._tokenizer.n_words):
            if self._tokenizer.is_special(number):
                content = self._tokenizer.id_to_piece(number)
                added[content] = backends.BackendToken(number, content)
            elif number >= self._tokenizer.num_special_tokens:
                break
        self.facts = backends.BackendFacts(
            name=name,
            kind=f"mistral-common {type(self._tokenizer).__name__} {self._tokenizer.version.value}",
            abilities=frozenset({"decode", "render"}),
            versions={"mistral-common": version("mistral-common")},
            files={file.name: hash_file(file)},
            added=added,
            vocab_size=self._tokenizer.n_words,
            tables=_tekken_tables(file, added) if file.suffix == ".json" else model_tables(file.read_bytes()),
            notes=("mistral-common reads control tokens in text as text",),
        )

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        return [self._tokenizer.encode(text, bos=special, eos=False) for text in texts]

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        return [self._tokenizer.decode(list(ids), special_token_policy=SpecialTokenPolicy.IGNORE) for ids in sequences]

    def render(self, conversation: backends.SkewChat) -> backends.Rendering:
        """See `Backend`. Conversations that fail the library's checks can't be compared."""
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        if not conversation.generate:
            raise UnsupportedParameter("mistral-common can't leave out the generation prompt", "add_generation_prompt")
        stripped = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in conversation.messages]
        messages = [with_text_arguments(message) for message in stripped]
        try:
            request = ChatCompletionRequest.from_openai(messages=messages, tools=list(conversation.tools) or None)
            return backends.Rendering(list(self._chat.encode_chat_completion(request).tokens), None)
        except Exception as error:  # the library raises the errors of all its checks
            refused = f"mistral-common refuses the conversation: {type(error).__name__}"
            if [message["role"] for message in messages] == ["user"]:
                raise TemplateRefused(refused) from error
            raise UnsupportedParameter(refused, "messages") from error

    def token(self, token_id: int) -> str | None:
        return str(self._tokenizer.id_to_piece(token_id)) if 0 <= token_id < self._tokenizer.n_words else None


def _tekken_tables(file: Path, added: Mapping[str, backends.BackendToken]) -> dict[str, dict[str, Any]]:
    """Return what the library uses: not the `token_str` of pieces, and its own control tokens if the file has none."""
    doc = read_json(file)
    pieces = {_piece(entry["token_bytes"]): entry["rank"] for entry in doc["vocab"]}
    controls = {content: token.id for content, token in added.items()}
    return {"pieces": pieces, "control tokens": controls, "settings": dict(doc["config"])}


def _piece(encoded: str) -> str:
    """Return the text of bytes in base64, or `encoded` if they are not UTF-8."""
    try:
        return base64.b64decode(encoded).decode()
    except UnicodeDecodeError:
        return encoded


class TiktokenBackend(TemplateBackend):
    """Runs tiktoken on ranks, with control tokens from tokenizer_config.json. `path#NAME` selects one of `SPLITS`."""

    def __init__(self, name: str, path: str, options: backends.BackendOptions) -> None:
        folder, _, split = path.partition("#")
        file = Path(folder) / "tiktoken.model" if Path(folder).is_dir() else Path(folder)
        tiktoken = require("tiktoken")
        ranks = read_ranks(file)
        assumed = not split
        split = split or ("o200k_base" if len(ranks) > _O200K_RANKS else "cl100k_base")
        if split not in SPLITS or len(SPLITS[split]) > 1:
            usable = ", ".join(split_name for split_name, expressions in SPLITS.items() if len(expressions) == 1)
            raise InvalidRequest(f"found split {split!r}; tiktoken accepts one of: {usable}")
        config = read_json(file.parent / "tokenizer_config.json")
        added = {
            token["content"]: backends.BackendToken(
                int(number),
                token["content"],
                bool(token.get("special", True)),
                normalized=bool(token.get("normalized")),  # tiktoken normalizes nothing
            )
            for number, token in config.get("added_tokens_decoder", {}).items()
        }
        try:
            self._encoding: Any = tiktoken.Encoding(
                name=file.name,
                pat_str=SPLITS[split][0],
                mergeable_ranks=ranks,
                special_tokens={token.content: token.id for token in added.values()},
            )
        except Exception as error:  # its Rust core raises nothing narrower
            raise TokenizerUnusable(f"tiktoken can't load {file}: {error}") from error
        self.reopened_as = f"tiktoken:{file}#{split}"
        self._template, self._options = find_template(file.parent, config, options), options
        special_tokens = named_special_tokens(config)
        able: dict[backends.Ability, bool] = {
            "decode": True,
            "controls": bool(added),
            "render": self._template is not None,
        }
        self.facts = backends.BackendFacts(
            name=name,
            kind="tiktoken ranks",
            abilities=frozenset(ability for ability, has in able.items() if has),
            versions={"tiktoken": version("tiktoken")},
            files={file.name: hash_file(file)},
            spec=_spec(ranks, split, list(added.values())),
            added=added,
            vocab_size=self._encoding.n_vocab,
            template=self._template.source if self._template else None,
            date=options.date,
            template_variables={**special_tokens, **options.kwargs},
            special_tokens=special_tokens,
            notes=(f"the split is assumed to be {split}; to use a different split, append #NAME",) if assumed else (),
        )

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """See `Backend`. tiktoken adds no BOS and EOS."""
        return list(self._encoding.encode_batch(list(texts), num_threads=1, allowed_special="all"))

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return [self._encoding.decode(list(ids)) for ids in sequences]

    def token(self, token_id: int) -> str | None:
        try:
            data: bytes = self._encoding.decode_single_token_bytes(token_id)
        except KeyError:
            return None
        return data.decode("utf-8", "backslashreplace")


def _spec(ranks: Mapping[bytes, int], split: str, added: Sequence[backends.BackendToken]) -> dict[str, Any]:
    """Return a tokenizer.json that encodes as tiktoken does: its merges are all pairs that form a token, by rank."""
    merges: list[list[str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        merges += (
            [byte_piece(left), byte_piece(right)]
            for left, right in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        )
    return {
        "version": "1.0",
        "added_tokens": [asdict(token) for token in added],
        "normalizer": None,
        "pre_tokenizer": byte_level(split),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {byte_piece(token): rank for token, rank in ranks.items()},
            "merges": merges,
            "ignore_merges": True,
        },
    }


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read the rank of each token, from lines with a base64 token and its rank. Raises `TokenizerUnusable`."""
    ranks: dict[bytes, int] = {}
    try:
        for line in filter(None, path.read_bytes().splitlines()):
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error):
        raise TokenizerUnusable(f"{path} has no tiktoken ranks: expected lines with base64 and a number") from None
    tokens: dict[int, bytes] = {}
    for token, number in ranks.items():
        if (earlier := tokens.setdefault(number, token)) != token:
            raise TokenizerUnusable(f"{path} gives the rank {number} to both {earlier!r} and {token!r}")
    return ranks


_IDS, _PIECES = ([f"{which}_{what}" for which in ("unk", "bos", "eos", "pad")] for what in ("id", "piece"))
_SETTINGS = ("model_type", "treat_whitespace_as_suffix", "byte_fallback", *_IDS, "unk_surface", *_PIECES)
_NORMALIZER = ("precompiled_charsmap", "add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces")
"""The fields of SentencePiece's TrainerSpec and NormalizerSpec that change ids or text."""
_FIELDS = {
    "pieces": "pieces",
    "settings": "trainer_spec",
    "normalizer": "normalizer_spec",
    "denormalizer": "denormalizer_spec",
}
"""Fields of SentencePiece's ModelProto by the names of tables."""
_TYPES = ("", "normal", "unknown", "control", "user-defined", "unused", "byte")
_LONGEST = 40


class SentencePieceBackend(backends.Backend):
    """Runs `sentencepiece` on a model file. It encodes control tokens in text as text, and has no chat template."""

    def __init__(self, name: str, path: str, options: backends.BackendOptions) -> None:
        file = Path(path) / "tokenizer.model" if Path(path).is_dir() else Path(path)
        try:
            model: Any = require("sentencepiece").SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise TokenizerUnusable(f"sentencepiece can't load {file}: {error}") from None
        self._model, self.reopened_as, self._data = model, f"spm:{file}", file.read_bytes()
        controls = [number for number in range(model.vocab_size()) if model.is_control(number)]
        ends = {f"{which}_token": getattr(model, f"{which}_id")() for which in ("bos", "eos", "pad", "unk")}
        self.facts = backends.BackendFacts(
            name=name,
            kind="SentencePiece model",
            abilities=frozenset({"decode"}),
            versions={"sentencepiece": version("sentencepiece")},
            files={file.name: hash_file(file)},
            tables=model_tables(self._data),
            added={
                model.id_to_piece(number): backends.BackendToken(number, model.id_to_piece(number))
                for number in controls
            },
            vocab_size=model.vocab_size(),
            special_tokens={key: model.id_to_piece(number) for key, number in ends.items() if number >= 0},
            notes=("SentencePiece reads control tokens in text as text",),
        )

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        return list(self._model.encode(list(texts), out_type=int, add_bos=special, add_eos=False))

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return [self._model.decode(list(ids)) for ids in sequences]

    def with_tables(
        self, names: Collection[str], other: backends.Backend
    ) -> Callable[[Sequence[str]], list[list[int]]] | None:
        """See `Backend`."""
        if not isinstance(other, SentencePieceBackend):
            return None
        ours, theirs = _parsed(self._data), _parsed(other._data)
        for field in (_FIELDS[name] for name in names):
            ours.ClearField(field)
            getattr(ours, field).MergeFrom(getattr(theirs, field))
        try:
            model = require("sentencepiece").SentencePieceProcessor(model_proto=ours.SerializeToString())
        except (OSError, RuntimeError):
            return None
        return lambda texts: list(model.encode(list(texts), out_type=int))

    def token(self, token_id: int) -> str | None:
        return str(self._model.id_to_piece(token_id)) if 0 <= token_id < self._model.vocab_size() else None


def model_tables(data: bytes) -> dict[str, dict[str, Any]]:
    """Return the tables of a SentencePiece model. Raises `TokenizerUnusable` if it is corrupt."""
    model = _parsed(data)
    return {
        "normalizer": {name: _short(getattr(model.normalizer_spec, name)) for name in _NORMALIZER},
        "denormalizer": {_NORMALIZER[0]: _short(model.denormalizer_spec.precompiled_charsmap)},
        "settings": {name: _short(getattr(model.trainer_spec, name)) for name in _SETTINGS},
        # Nine digits tell all float32 scores apart.
        "pieces": {
            piece.piece: (n, float(f"{piece.score:.9g}"), _TYPES[piece.type]) for n, piece in enumerate(model.pieces)
        },
    }


def _parsed(data: bytes) -> Any:
    """Return the ModelProto in a model file. Raises `TokenizerUnusable` if the file is corrupt."""
    damaged = require("google.protobuf.message").DecodeError
    try:
        return require("sentencepiece.sentencepiece_model_pb2").ModelProto.FromString(data)
    except damaged as error:
        raise TokenizerUnusable(f"the file is not a SentencePiece model: {error}") from error


def _short(value: bytes | str | int) -> str | int:
    if isinstance(value, int):
        return int(value)
    data = value.encode() if isinstance(value, str) else value
    return data.decode(errors="replace") if len(data) <= _LONGEST else f"SHA-256 {sha256(data).hexdigest()}"
