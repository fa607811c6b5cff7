"""The files of `data/models`: trained by the script beside them, of the kinds in their names, licensed."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest
import tiktoken
import tokenizers

from tests.chat.conftest import FAMILIES, SMALL, SMALL_TEMPLATES, load_tokenizer
from tests.chat.data import make_tokenizers

CORPUS = make_tokenizers.corpus()[0].splitlines()


def test_script_writes_the_committed_files() -> None:
    here = {path.relative_to(SMALL).as_posix() for path in SMALL.glob("*/*") if path.is_file()}
    made = make_tokenizers.files()
    assert set(made) == here
    assert [name for name, text in made.items() if (SMALL / name).read_text(encoding="utf-8") != text] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_added_tokens_load_with_their_written_ids(family: str) -> None:
    path = SMALL / family / "tokenizer.json"
    loaded = tokenizers.Tokenizer.from_file(str(path))
    for token in json.loads(path.read_bytes())["added_tokens"]:
        assert loaded.token_to_id(token["content"]) == token["id"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_vocabulary_learned_more_than_letters(family: str) -> None:
    """Texts of its corpus take well under a token per byte, so merges occur in all tests."""
    text = "\n".join(CORPUS)
    assert len(load_tokenizer(family).encode_plain(text)) < 0.7 * len(text.encode())


def test_tiktoken_encodes_to_the_same_ids() -> None:
    """The tokenizer.json built from ranks, compared with tiktoken."""
    lines = (SMALL / "gpt_oss" / "tiktoken.model").read_bytes().splitlines()
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in (line.split() for line in lines)}
    encoding = tiktoken.Encoding("small", pat_str=make_tokenizers.O200K_SPLIT, mergeable_ranks=ranks, special_tokens={})
    for line in CORPUS:
        assert load_tokenizer("gpt_oss").encode_plain(line) == encoding.encode_ordinary(line)


def test_every_template_is_ours_or_shipped_with_its_license() -> None:
    manifest = json.loads((SMALL / "MANIFEST.json").read_bytes())
    shipped = {entry["path"]: entry for entry in manifest["shipped"]}
    assert sorted([*shipped, *manifest["written_here"]]) == SMALL_TEMPLATES
    for name, entry in shipped.items():
        assert hashlib.sha256((SMALL / name).read_bytes()).hexdigest() == entry["sha256"]
        assert entry["license"] in manifest["licenses"]
        assert entry["copyright"] in (SMALL / "NOTICE").read_text(encoding="utf-8")
    for text in manifest["licenses"].values():
        assert "Apache License" in (Path(SMALL) / text).resolve().read_text(encoding="utf-8")
