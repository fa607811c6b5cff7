"""What the agents of `scripted_agents.py` are given: a question, two tools, where the model is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

BASE_URL = os.environ["AGENT_BASE_URL"]
"""Up to and including `/v1`."""
STREAM = os.environ.get("AGENT_STREAM") == "1"
QUESTION = sys.argv[1]


def read_file(path: str) -> str:
    """Return the text of a file.

    Args:
        path: The file.

    """
    return Path(path).read_text("utf-8")


def write_file(path: str, text: str) -> str:
    """Write a file.

    Args:
        path: The file.
        text: Its new text.

    """
    Path(path).write_text(text, "utf-8")
    return "written"
