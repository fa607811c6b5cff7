"""The durable record of sessions: a data directory, a PostgreSQL database, or an archive that is only read."""

from tokentape.store.base import Store
from tokentape.store.head import Head, read_head
from tokentape.store.listing import SessionSummary
from tokentape.store.location import open_record
from tokentape.store.reads import StoredSession
from tokentape.store.rows import Record
from tokentape.store.sqlite import SqliteStore
from tokentape.store.verify import verify

__all__ = [
    "Head",
    "Record",
    "SessionSummary",
    "SqliteStore",
    "Store",
    "StoredSession",
    "open_record",
    "read_head",
    "verify",
]
