"""A model's tokenizer files as data: read, changed and written again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokentape.demo import MODEL

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CONFIG = "config.json"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
FILES = (TOKENIZER, TOKENIZER_CONFIG, CONFIG, GENERATION, TEMPLATE)
TINY = "tiny"
SMALL = Path(__file__).parents[2] / "chat" / "data" / "models"
REAL = Path(os.environ.get("TOKENTAPE_TOKENIZERS", Path(__file__).parents[4] / "shared" / "tokenizers"))


@dataclass(frozen=True)
class Model:
    """The files of one model: JSON parsed, the template as text."""

    name: str
    docs: Mapping[str, Any]
    styles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments of `json.dumps` by file, where the file is written in another style than the default."""

    def written(self, file: str) -> str:
        """Return one file as text."""
        doc = self.docs[file]
        return doc if file == TEMPLATE else json.dumps(doc, **{"ensure_ascii": False, **self.styles.get(file, {})})


def write(model: Model, folder: Path, like: tuple[Model, Path] | None = None) -> Path:
    """Write a model's files into a new folder; files that are those of `like` are linked to its folder."""
    folder.mkdir(parents=True)
    for file in model.docs:
        if like is not None and like[0].docs.get(file) is model.docs[file] and file not in model.styles:
            os.link(like[1] / file, folder / file)
        else:
            (folder / file).write_text(model.written(file), encoding="utf-8")
    return folder


def names(*, real: bool = True) -> list[str]:
    """Return the names of the models that are here: the demo's, the small ones of the tests, and real ones."""
    small = [f"small-{path.parent.name}" for path in sorted(SMALL.glob(f"*/{TOKENIZER}"))]
    return [TINY, *small, *(path.parent.name for path in sorted(REAL.glob(f"*/{TOKENIZER}")) if real)]


@cache
def load(name: str) -> Model:
    """Read a model's files. A family without config.json or generation_config.json gets plausible ones."""
    folder = MODEL if name == TINY else SMALL / name[6:] if name.startswith("small-") else REAL / name
    docs: dict[str, Any] = {}
    for file in FILES:
        if (folder / file).is_file():
            text = (folder / file).read_text(encoding="utf-8")
            docs[file] = text if file == TEMPLATE else json.loads(text)
    config = docs.setdefault(TOKENIZER_CONFIG, {})
    if TEMPLATE not in docs and "chat_template" not in config:
        own = sorted(p for p in (folder / "templates").glob("*.jinja") if not p.name.startswith("fixed-"))
        if own:
            docs[TEMPLATE] = own[0].read_text(encoding="utf-8")
    ids = added_ids(docs[TOKENIZER])
    eos = ids.get(token_text(config.get("eos_token")) or "")
    bos = ids.get(token_text(config.get("bos_token")) or "")
    docs.setdefault(CONFIG, {"bos_token_id": bos, "eos_token_id": eos, "vocab_size": -(-(top_id(docs) + 1) // 64) * 64})
    docs.setdefault(
        GENERATION, {"bos_token_id": bos, "eos_token_id": [eos, *list(ids.values())[:1]], "do_sample": True}
    )
    return Model(name, docs)


def token_text(value: Any) -> str | None:
    """Return the text of a `*_token` entry of tokenizer_config.json: it is a string or an object with `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def added_ids(spec: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of a tokenizer.json's added tokens by their text."""
    return {token["content"]: token["id"] for token in spec.get("added_tokens") or ()}


def top_id(docs: Mapping[str, Any]) -> int:
    """Return the highest id of a tokenizer.json."""
    vocab = docs[TOKENIZER]["model"]["vocab"]
    own = max(vocab.values()) if isinstance(vocab, Mapping) else len(vocab) - 1
    return max([own, *added_ids(docs[TOKENIZER]).values()])
