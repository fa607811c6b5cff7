"""Keep the model with which a record was made, which is needed to decode its ids later.

`model.json` in a data directory names the model folder. The vocabulary that the ids belong to is in the database.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, exists, select

from tokentape.errors import InvalidRequest, StoreCorrupt, TokenizerUnusable
from tokentape.store import _schema as schema

if TYPE_CHECKING:
    from tokentape.chat._tokenizer import Tokenizer

_log = logging.getLogger("tokentape.store")

MODEL_NAME = "model.json"

_VOCABULARY = "vocabulary"


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
    from tokentape.chat._tokenizer import Tokenizer

    if served is None:
        return "this record doesn't name the model that was served"
    if not (Path(served.folder) / "tokenizer.json").is_file():
        return f"the tokenizer is no longer in {served.folder}"
    tokenizer = Tokenizer.load(served.folder)
    if tokenizer.sha256 != served.tokenizer_sha256:
        return f"the tokenizer in {served.folder} has changed since"
    return tokenizer


def bind_vocabulary(
    connection: Connection, tokenizer: Tokenizer, served: ServedModel | None, gateway_id: str | None
) -> None:
    """Make the tokenizer's vocabulary that of the record, or raise `InvalidRequest` if the record has another.

    A record without setups has no ids, so its vocabulary may still change, unless another gateway than `gateway_id`
    uses it. `served` tells the vocabulary of a record from a version that did not store it, if the folder still can.
    """
    meta, gateways = schema.meta, schema.gateways.c.gateway_id
    own = described(tokenizer)
    stored = stored_vocabulary(connection)
    used = connection.execute(select(exists().where(schema.setups.c.digest.is_not(None)))).scalar_one()
    recorded = _served_before(served, tokenizer) if stored is None and used and served is not None else stored
    if recorded not in (None, own):
        others = exists().where(gateways.is_not(None) if gateway_id is None else gateways != gateway_id)
        if used or connection.execute(select(others)).scalar_one():
            folder = "" if served is None else f", last served from {served.folder}"
            raise InvalidRequest(
                f"this record belongs to another tokenizer ({recorded}{folder}). The tokenizer to serve has {own}. "
                "A record keeps one vocabulary, so that its ids keep their meaning. Serve the recorded model, or start "
                "a new record: use another --data directory, or another --store database",
                "data",
            )
    if stored != own:
        connection.execute(meta.delete().where(meta.c.key == _VOCABULARY))
        connection.execute(meta.insert().values(key=_VOCABULARY, value=own))


def stored_vocabulary(connection: Connection) -> str | None:
    """Return the size and digest of the record's vocabulary, as text; None if the record is not bound to one."""
    found: str | None = connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == _VOCABULARY)).scalar()
    return found


def engines_of(connection: Connection) -> set[str]:
    """Return the engines that sampled the record's turns, as in `Turn.engine`."""
    return set(connection.execute(select(schema.turns.c.engine).distinct()).scalars())


def described(tokenizer: Tokenizer) -> str:
    """Return the size and digest of a tokenizer's vocabulary, as `stored_vocabulary` does."""
    return f"{tokenizer.vocab_size} ids, digest {tokenizer.vocabulary_sha256[:16]}"


def _served_before(served: ServedModel, tokenizer: Tokenizer) -> str | None:
    """Describe the vocabulary of the model that was served; None if that can't be found out any more."""
    if served.tokenizer_sha256 == tokenizer.sha256:
        return described(tokenizer)
    try:
        before = served_tokenizer(served)
    except TokenizerUnusable as error:
        before = str(error)
    if not isinstance(before, str):
        return described(before)
    _log.warning("it is not known whether this record has ids of the same tokenizer: %s", before)
    return None
