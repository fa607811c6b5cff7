"""Threads that parse a kind of response for the first time, in a process that may crash."""

from __future__ import annotations

import subprocess
import sys

RACE = """
import sys, threading
from dataclasses import make_dataclass
from tokentape.client._calls import reader

sys.setswitchinterval(1e-6)
for n in range(100):
    inner = make_dataclass(f"Inner{n}", [(f"f{i}", "int | None", 0) for i in range(20)])
    kind = make_dataclass(f"Kind{n}", [("a", int), ("b", list[inner])])
    start = threading.Barrier(8)

    def decode():
        start.wait()
        assert reader(kind)(b'{"a": 1, "b": [{"f1": 2}]}').b[0].f1 == 2

    threads = [threading.Thread(target=decode) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
"""


def test_threads_that_parse_first_responses_together_do_not_crash() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
