"""Keep the durable record of sessions: a data directory, a PostgreSQL database, or a read-only archive."""

from tokentape.store._base import Store
from tokentape.store._head import Head, read_head
from tokentape.store._listing import SessionSummary
from tokentape.store._location import open_record
from tokentape.store._reads import StoredSession
from tokentape.store._rows import Record
from tokentape.store._sqlite import SqliteStore
from tokentape.store._verify import verify

__all__ = [
    "Head", "Record", "SessionSummary", "SqliteStore", "Store", "StoredSession", "open_record", "read_head",
    "verify",
]  # fmt: skip
