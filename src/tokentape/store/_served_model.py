"""Read and write `model.json`: the model with which a data directory was recorded, needed to decode its ids later."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import StoreCorrupt

MODEL_NAME = "model.json"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model folder with which the gateway was last started."""

    folder: str
    """The absolute path of the model folder. Its contents may have changed since."""
    tokenizer_sha256: str
    """The hex SHA-256 of the folder's `tokenizer.json`. With the same digest, every id has the same text."""
    fingerprint: str
    """As in `Setup`: tokenizer, template and library versions."""


def write_served_model(directory: str | Path, model: ServedModel) -> None:
    """Write `model` to the data directory's `model.json`, replacing the file."""
    path = Path(directory) / MODEL_NAME
    part = path.with_suffix(".part")
    part.touch(mode=0o600)
    part.write_text(json.dumps(asdict(model), indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)


def read_served_model(directory: str | Path) -> ServedModel | None:
    """Read `model.json`. Return None if it does not exist. Raises `StoreCorrupt` if it can't be read."""
    path = Path(directory) / MODEL_NAME
    if not path.is_file():
        return None
    try:
        return ServedModel(**json.loads(path.read_bytes()))
    except (TypeError, ValueError):
        raise StoreCorrupt(f"{path} is damaged; delete it and pass the model folder instead") from None


def served_tokenizer(served: ServedModel | None) -> Tokenizer | str:
    """Return the tokenizer with which a record was served, or the reason that it is not available."""
    if served is None:
        return "this record doesn't name the model that was served"
    if not (Path(served.folder) / "tokenizer.json").is_file():
        return f"the tokenizer is no longer in {served.folder}"
    tokenizer = Tokenizer.load(served.folder)
    if tokenizer.sha256 != served.tokenizer_sha256:
        return f"the tokenizer in {served.folder} has changed since"
    return tokenizer
