"""Load a model's tokenizer and keep its control tokens apart from text.

In `chat`, text that may contain control tokens is *marked text*: a `str` in which every control token is replaced by a
mark, a pair of lone surrogates that no valid text contains. If a user types the characters of `<|im_end|>`, they stay
characters; the token itself is a mark. Templates are rendered to marked text, marked text is encoded, and sampled ids
are converted to marked text before they are parsed, so that text can never pass for a control token.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from msgspec import Struct

from tokentape.chat._byte_level import byte_piece, bytes_of_piece
from tokentape.chat._sections import LONG, Sections
from tokentape.chat._tokenizer_files import (
    NAMING_CONFIGS,
    AddedToken,
    any_of,
    config_values,
    from_text,
    is_control,
    named_special_tokens,
    read_added_tokens,
    read_json,
    renamed_controls,
    with_configured_tokens,
)
from tokentape.errors import InvalidRequest, TokenizerUnusable
from tokentape.types import TokenIds

_HIGH, _LOW = 0xD800, 0xDC00
MARK = re.compile("[\ud800-\udb7f][\udc00-\udfff]")
"""Matches the mark of any control token."""

_FIRST_MARKS = re.compile("\ud800[\udc00-\udfff]")
"""Matches the marks of the first 1,024 control tokens. A fixed first character is found four times as fast."""

_BLOCKS = (0x100000, 0xF0000, 0x108000, 0xF8000)
"""The first code points of private-use blocks for the twin's names. A text rarely uses all four blocks."""

_BLOCK_SIZE = 0x7FF0


class Encoded(Struct, frozen=True):
    """The ids of a marked text, and the character span of each id."""

    array: TokenIds
    """The ids, int32 [ids]."""
    spans: npt.NDArray[np.int64]
    """For each id, the half-open range of characters in `text`, shape [ids, 2]."""
    text: str
    """The marked text with one character in place of each mark."""

    @property
    def ids(self) -> list[int]:
        ids: list[int] = self.array.tolist()
        return ids


@dataclass(frozen=True, slots=True)
class _Twin:
    """A tokenizer in which every control token has a private one-character name."""

    encoder: tokenizers.Tokenizer
    names: Mapping[str, str]
    """Names by mark."""
    mark: re.Pattern[str]
    sections: Sections

    def named(self, marked: str) -> str:
        """Return the marked text with a name in place of each mark."""
        return self.mark.sub(lambda match: self.names.get(match[0], match[0]), marked)


class Tokenizer:
    """A `tokenizer.json` and its configuration. Use `Tokenizer.load`.

    Text is encoded by a twin of the tokenizer in which every control token has a private one-character name. Text
    therefore never yields a control id, whatever it spells and whatever the token's flags. Merges, normalization and
    white-space rules around control tokens are the same as in the real tokenizer.
    """

    def __init__(
        self,
        source: bytes,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        *,
        other_configs: Sequence[Mapping[str, Any]] = (),
        named_in: Sequence[str] = (),
        strict_text: bool = False,
    ) -> None:
        spec = json.loads(source.decode())  # like `tokenizers`, accept only UTF-8 without a byte order mark
        self._spec = with_configured_tokens(spec, config)
        if self._spec is not spec:
            source = json.dumps(self._spec).encode()
        self.config = config
        self.sha256 = hashlib.sha256(source).hexdigest()
        self.strict_text = strict_text
        self.added_tokens = read_added_tokens(self._spec)
        self._added_by_content = {token.content: token for token in self.added_tokens}
        values = [*config_values([config, *other_configs])]
        self._named_in = (*named_in, *(value for _, value in values if isinstance(value, str)))
        self._named_ids = frozenset(
            value for key, value in values if isinstance(value, int) and key.endswith(("_token_id", "_token_index"))
        )
        if dropout := self._spec["model"].get("dropout"):
            raise TokenizerUnusable(f"model.dropout is {dropout} in tokenizer.json, so ids are random; set it to null")
        vocab = self._spec["model"]["vocab"]
        self._vocab = vocab if isinstance(vocab, Mapping) else {entry[0]: n for n, entry in enumerate(vocab)}
        self.vocab_size = 1 + max([*self._vocab.values(), *(token.id for token in self.added_tokens)], default=-1)
        self.special_tokens = named_special_tokens(config)
        self._set_controls()
        self._generation_config = generation_config or {}
        self.eos_ids = self._eos_ids(self._generation_config)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_twins": {}, "_breaks": {}}  # caches that can't be pickled

    def _set_controls(self) -> None:
        """Separate the added tokens into control tokens and text tokens."""
        named = "\0".join(self._named_in)
        controls = (
            token
            for token in self.added_tokens
            if is_control(token, named, self._named_ids) or (self.strict_text and not token.is_space)
        )
        self.controls = tuple(replace(token, mark=_mark(index)) for index, token in enumerate(controls))
        """The added tokens whose ids must never result from callers' text."""
        self._by_content = {control.content: control for control in self.controls}
        self._by_id = {control.id: control for control in self.controls}
        self._by_mark = {control.mark: control for control in self.controls}
        self.mark = _FIRST_MARKS if len(self.controls) <= 1024 else MARK
        """Matches the marks of this tokenizer's control tokens."""
        self.text_tokens = tuple(token for token in self.added_tokens if token.content not in self._by_content)
        """Added tokens that are ordinary text, such as HTML tags and runs of spaces; text is encoded as them."""
        self.control_pattern = any_of(self.controls)
        self._added_pattern = any_of([*self.controls, *(token for token in self.text_tokens if not token.normalized)])
        # The anchor, a mark that is put before text, must not absorb the text's own white space.
        self._anchor = next((control.mark for control in self.controls if not control.strips), "")
        spelled = [token for token in self.text_tokens if token.content not in self._vocab]
        self._bytes: dict[int, bytes] = {token.id: token.content.encode() for token in spelled if not token.normalized}
        # `tokenizers` stores these as the normalizer writes them: it may put a space before them.
        self._normalized = {token.id for token in spelled if token.normalized}
        self._twins: dict[int, _Twin] = {}
        self._breaks: dict[frozenset[int], frozenset[int]] = {}

    def for_template(self, source: str) -> Tokenizer:
        """Return a tokenizer in which added tokens that occur in `source`, a template's text, are control tokens."""
        if not any(token.content in source for token in self.text_tokens if not token.is_words):
            return self
        tokenizer = copy(self)
        tokenizer._named_in = (*self._named_in, source)
        tokenizer._set_controls()
        return tokenizer

    @classmethod
    def load(cls, folder: str | Path, *, strict_text: bool = False) -> Tokenizer:
        """Load `tokenizer.json` and the configuration files in a model folder.

        These added tokens are control tokens: special tokens, tokens that the folder's chat templates or configuration
        files name, and tokens of the form `<|...|>`. Other added tokens, such as HTML tags and runs of spaces, are
        treated as text. With `strict_text`, all added tokens except white space are control tokens.

        Raises `TokenizerUnusable` if `tokenizer.json` is missing or corrupt, or if the tokenizer needs code from the
        folder (`trust_remote_code`).
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            contents = (
                ", ".join(sorted(p.name for p in folder.glob("*"))[:12]) or "an empty folder"
                if folder.is_dir()
                else "no such folder"
            )
            raise TokenizerUnusable(
                f"no tokenizer.json in {folder} (found: {contents}). Convert the tokenizer once with "
                "`AutoTokenizer.from_pretrained(...).save_pretrained(...)` and check it with `tokentape audit`."
            )
        config = read_json(folder / "tokenizer_config.json")
        if "auto_map" in config:
            raise TokenizerUnusable(
                f"{folder / 'tokenizer_config.json'} has `auto_map`: it asks to run code from the model folder. "
                "Remove that entry if tokenizer.json is the complete tokenizer."
            )
        generation_config = read_json(folder / "generation_config.json")
        try:
            return cls(
                path.read_bytes(),
                config,
                generation_config,
                other_configs=[read_json(folder / name) for name in NAMING_CONFIGS],
                named_in=[template.read_text("utf-8", "replace") for template in sorted(folder.glob("**/*.jinja"))],
                strict_text=strict_text,
            )
        except TokenizerUnusable:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise TokenizerUnusable(
                f"{path} is corrupt or not a tokenizer ({type(error).__name__}: {error}); copy the model folder again"
            ) from error

    def with_files(self, source: bytes, config: Mapping[str, Any]) -> Tokenizer:
        """Return a tokenizer with a different tokenizer.json and tokenizer_config.json.

        The texts that name control tokens, the generation config and `strict_text` stay the same.
        """
        return Tokenizer(source, config, self._generation_config, named_in=self._named_in, strict_text=self.strict_text)

    def added_token(self, content: str) -> AddedToken | None:
        """Return the added token spelled `content`, control token or text, or None."""
        return self._added_by_content.get(content)

    def control(self, content: str) -> AddedToken | None:
        """Return the control token spelled `content`, or None."""
        return self._by_content.get(content)

    def control_by_id(self, token_id: int) -> AddedToken | None:
        """Return the control token with this id, or None."""
        return self._by_id.get(token_id)

    def mark_controls(self, text: str) -> str:
        """Replace every control token spelled in `text` by its mark. Use only for text that a template wrote."""
        # Text tokens are also matched because the tokenizer uses the leftmost of overlapping tokens.
        return self._added_pattern.sub(
            lambda match: self._by_content[match[0]].mark if match[0] in self._by_content else match[0], text
        )

    def spell_marks(self, marked: str) -> str:
        """Replace each mark by the spelling of its control token, for people to read. Never encode the result."""
        return MARK.sub(lambda match: self._by_mark[match[0]].content, marked)

    def control_of_mark(self, mark: str) -> AddedToken:
        """Return the control token of a mark."""
        return self._by_mark[mark]

    def marks(self, ids: Iterable[int]) -> frozenset[str]:
        """Return the marks of the control tokens with these ids."""
        return frozenset(self._by_id[token_id].mark for token_id in ids if token_id in self._by_id)

    def breaks(self, stop_ids: frozenset[int]) -> frozenset[int]:
        """Return the control tokens' ids and the `stop_ids`."""
        ids = self._breaks.get(stop_ids)
        if ids is None:
            ids = self._breaks[stop_ids] = stop_ids.union(self._by_id)
        return ids

    def encode_marked(self, marked: str) -> Encoded:
        """Encode marked text: marks become control ids, all other characters ordinary ids.

        Raises `InvalidRequest` if the text contains a lone surrogate, which is not valid Unicode.
        """
        twin = self._twin(self._free_block(marked))
        text = twin.named(marked)
        try:
            if len(text) >= LONG:
                return Encoded(*twin.sections.encode(text), text)
            encoding = twin.encoder.encode(text, add_special_tokens=False)
        except TypeError as error:  # what `tokenizers` raises for text that is not valid Unicode
            raise InvalidRequest("the text contains a lone surrogate, which is not valid Unicode") from error
        ids = encoding.ids
        spans = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(ids)).reshape(-1, 2)
        return Encoded(self.array(ids), spans, text)

    def encode_marked_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many marked texts to ids, several times as fast as `encode_marked`."""
        twin = self._twin(self._free_block("".join(texts)))
        named = [twin.named(text) for text in texts]
        return [encoding.ids for encoding in twin.encoder.encode_batch_fast(named, add_special_tokens=False)]

    def encode_after_control(self, marked: str, mark: str = "") -> Encoded:
        """Encode marked text as it is encoded after a control token, not at the start of a text.

        SentencePiece-style tokenizers put a space before a text's first word only. Pass the control token's `mark` if
        it is known, because some control tokens absorb the white space after them.
        """
        anchor = mark or self._anchor
        encoded = self.encode_marked(anchor + marked)
        if not anchor:
            return encoded
        return Encoded(encoded.array[1:], encoded.spans[1:] - 1, encoded.text[1:])

    def encode_after(self, before: str, marked: str) -> Encoded:
        """Encode marked text as it is encoded after the marked text `before`, unless a token spans both texts."""
        if before and not MARK.match(marked):
            whole, offset = self.encode_after_control(before + marked), len(MARK.sub(" ", before))
            first = int(np.searchsorted(whole.spans[:, 0], offset))
            if first and whole.spans[first - 1, 1] <= offset:
                return Encoded(whole.array[first:], whole.spans[first:] - offset, whole.text[offset:])
        return self.encode_after_control(marked)

    def encode_plain(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode as `tokenizers` and `transformers` do: a control token spelled in `text` becomes its id.

        Use it only for comparisons and whole prompts because text can become control tokens. `add_special_tokens` adds
        the tokenizer's special tokens, such as a beginning-of-sequence token.
        """
        # `encode` would stop all other threads meanwhile.
        return self._plain.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_plain_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts to ids, several times as fast as `encode_plain`."""
        return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of an id; for a control token, the bytes of its spelling."""
        data = self._bytes.get(token_id)
        if data is None:
            control = self._by_id.get(token_id)
            if control is not None:
                data = control.content.encode()
            else:
                known = 0 <= token_id < self.vocab_size
                piece = self._twin(_BLOCKS[0]).encoder.id_to_token(token_id) if known else None
                if piece is None:
                    raise InvalidRequest(f"token id {token_id} is not in the vocabulary of {self.vocab_size} ids")
                data = self._piece_bytes(piece, is_text=token_id in self._normalized)
            self._bytes[token_id] = data
        return data

    def continuations(self, text: str, most: int = 64) -> list[str]:
        """Return what follows `text` in the first `most` vocabulary entries that begin with it."""
        spelled = text.encode()
        prefixes = (text, text.replace(" ", "\u2581"), byte_piece(spelled))
        longer = (piece for piece in self._vocab if piece.startswith(prefixes) and piece not in prefixes)
        whole = (self.token_bytes(self._vocab[piece]) for piece in islice(longer, most))
        rests = (entry[len(spelled) :].decode("utf-8", "ignore") for entry in whole if entry.startswith(spelled))
        return [rest for rest in rests if rest]

    def pieces(self, ids: Iterable[int]) -> list[bytes]:
        """Return the `token_bytes` of each id."""
        ids = list(ids)
        try:
            return list(map(self._bytes.__getitem__, ids))
        except KeyError:
            return list(map(self.token_bytes, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids with control tokens spelled out; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.pieces(ids)).decode("utf-8", "replace")

    def array(self, ids: Sequence[int] | TokenIds) -> TokenIds:
        """Return the ids as an int32 array, the type that records use.

        Raises `InvalidRequest` unless they are a flat sequence of whole numbers from 0 to 2147483647.
        """
        array = np.asarray(ids)
        whole = not array.size or (array.dtype.kind in "iu" and 0 <= array.min() <= array.max() < 2**31)
        if array.ndim != 1 or not whole:
            raise InvalidRequest(
                f"found {array.dtype.name} of shape {array.shape} as ids; expected a flat list of whole numbers from 0 "
                "to 2147483647"
            )
        return array.astype(np.int32, copy=False)

    def _free_block(self, marked: str) -> int:
        if len(marked.encode("utf-16-le", "surrogatepass")) == 2 * len(marked):
            return _BLOCKS[0]  # The text has no characters beyond U+FFFF.
        codes = np.frombuffer(marked.encode("utf-32-le", "surrogatepass"), np.uint32)
        for start in _BLOCKS:
            if not ((codes >= start) & (codes < start + _BLOCK_SIZE)).any():
                return start
        raise InvalidRequest(
            "the text has private-use characters (U+F0000 to U+10FFFD) in all four ranges with which Tokentape could "
            "mark control tokens while it renders; remove these characters from one range"
        )

    def _twin(self, start: int) -> _Twin:
        """Return the twin with names from the block at `start`."""
        twin = self._twins.get(start)
        if twin is None:
            # A vocabulary may contain private-use characters (Gemma's does).
            free = (char for char in map(chr, range(start, start + _BLOCK_SIZE)) if char not in self._vocab)
            name = dict(zip((control.content for control in self.controls), free, strict=False))
            encoder = from_text(json.dumps(renamed_controls(self._spec, name), ensure_ascii=False))
            for control in self.controls:
                if encoder.token_to_id(name[control.content]) != control.id:
                    raise TokenizerUnusable(f"can't keep the control token {control.content!r} apart from text")
            plain = (name[c.content] for c in self.controls if not c.strips)
            names = {c.mark: name[c.content] for c in self.controls}
            twin = self._twins[start] = _Twin(encoder, names, self.mark, Sections(encoder, frozenset(plain)))
        return twin

    @property
    def looks_words_up(self) -> bool:
        """Whether words in the vocabulary are looked up whole, without merges."""
        return bool(self._spec["model"].get("ignore_merges"))

    @cached_property
    def vocabulary_sha256(self) -> str:
        """The hex SHA-256 of all ids with their tokens. It ignores merges, settings and the layout of the file."""
        ids = {**self._vocab, **{token.content: token.id for token in self.added_tokens}}
        tokens = sorted(ids, key=ids.__getitem__)
        return hashlib.sha256(json.dumps([tokens, [ids[token] for token in tokens]]).encode()).hexdigest()

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        whole = {**self._spec, "truncation": None, "padding": None}
        return from_text(json.dumps(whole, ensure_ascii=False))

    @cached_property
    def _decoders(self) -> list[Mapping[str, Any]]:
        decoder = self._spec.get("decoder") or {"type": "Fuse"}
        steps: list[Mapping[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        types = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
        unknown = [step["type"] for step in steps if step["type"] not in types]
        if unknown:
            raise TokenizerUnusable(f"unknown tokenizer decoder {unknown[0]}; expected {', '.join(sorted(types))}")
        return steps

    def _piece_bytes(self, piece: str, *, is_text: bool) -> bytes:
        for step in self._decoders:
            match step["type"]:
                case "ByteLevel":
                    return piece.encode() if is_text else bytes_of_piece(piece)
                case "ByteFallback" if re.fullmatch("<0x[0-9A-F]{2}>", piece):
                    return bytes([int(piece[3:5], 16)])
                case "Metaspace":
                    piece = piece.replace(step["replacement"], " ")
                case "Replace" if "String" in step["pattern"]:
                    piece = piece.replace(step["pattern"]["String"], step["content"])
        return piece.encode()

    def _eos_ids(self, generation_config: Mapping[str, Any]) -> frozenset[int]:
        ids = generation_config.get("eos_token_id")
        eos_ids: set[Any] = set(ids) if isinstance(ids, list) else {ids} - {None}
        if not all(type(token_id) is int for token_id in eos_ids):
            raise TokenizerUnusable(f"generation_config.json: eos_token_id is {ids}, expected an id or a list of ids")
        control = self._by_content.get(self.special_tokens.get("eos_token", ""))
        if control is not None:
            eos_ids.add(control.id)
        return frozenset(eos_ids)


def _mark(index: int) -> str:
    return chr(_HIGH + index // 1024) + chr(_LOW + index % 1024)
