"""Convert between bytes and the printable characters that stand for them in byte-level vocabularies (GPT-2)."""

from __future__ import annotations


def _byte_of() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(rest)}


BYTE_OF = _byte_of()
CHAR_OF = {byte: char for char, byte in BYTE_OF.items()}
"""The character of each byte; `BYTE_OF` is the inverse."""
_NO_BYTE = {chr(byte): "\uffff" for byte in range(256) if chr(byte) not in BYTE_OF}
_BYTES = str.maketrans(_NO_BYTE | {char: chr(byte) for char, byte in BYTE_OF.items()})
"""Translates each character to the latin-1 character of its byte; other characters to U+FFFF, not in latin-1."""


def byte_piece(data: bytes) -> str:
    """Return the token string that represents `data` in a byte-level vocabulary."""
    return data.decode("latin-1").translate(CHAR_OF)


def bytes_of_piece(piece: str) -> bytes:
    """Return the bytes of a byte-level token string; for any other string, its UTF-8 bytes."""
    try:
        return piece.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


def text_of_byte_piece(piece: str) -> str:
    """Return the text of a byte-level token string without incomplete characters; any other string unchanged."""
    return bytes_of_piece(piece).decode(errors="ignore")
