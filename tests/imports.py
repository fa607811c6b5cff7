"""Modules of a new process after importing the parts of Tokentape that must load little."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from tokentape.chat._disk_cache import keep

CODE = """
import sys
# `openai` and `httpx` are not declared, so importing them would fail for users.
sys.modules.update(dict.fromkeys(("openai", "httpx")))
import tokentape, tokentape.cli, tokentape.engines._transformers, tokentape.gateway._app, tokentape.ray
[getattr(tokentape, name) for name in tokentape.__all__]
print(*[name for name, module in sys.modules.items() if module is not None])
"""


@cache
def loaded() -> frozenset[str]:
    """Return the names of that process's modules. Workers of a run share a process, unless two start at once."""
    kept = Path(os.environ["TOKENTAPE_CACHE"]) / "loaded-modules"
    if not kept.exists():
        done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
        keep(kept, done.stdout)
    return frozenset(kept.read_text("utf-8").split())
