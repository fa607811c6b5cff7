"""Observe and hold forward passes of the embedded engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Forwards(list[tuple[int, int]]):
    """The (rows, columns) of forward passes, which wait while `go_on` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.go_on.set()

    async def together(self, *calls: Coroutine[Any, Any, T]) -> list[T | BaseException]:
        """Run calls. None is computed before all have been requested, however slow the machine is."""
        self.go_on.clear()
        tasks = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)  # each task runs until it waits for the engine
        self.go_on.set()
        return await asyncio.gather(*tasks, return_exceptions=True)
