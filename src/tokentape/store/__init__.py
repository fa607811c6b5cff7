"""The durable record of sessions. `verify` checks one from outside: `from tokentape.store.verify import verify`."""

from tokentape.store.base import Store
from tokentape.store.listing import SessionSummary
from tokentape.store.reads import StoredSession
from tokentape.store.rows import Record
from tokentape.store.sqlite import SqliteStore

__all__ = ["Record", "SessionSummary", "SqliteStore", "Store", "StoredSession"]
