"""The process of a worker: `python -m tokentape.gateway.worker SOCKET`, started by a supervisor."""

from __future__ import annotations

import sys

from tokentape.gateway.workers import work

if __name__ == "__main__":
    work(int(sys.argv[1]))
