"""Code shared by peers. Each has its own environment; an environment variable names its Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def python_of(variable: str) -> Path | None:
    """Return the Python that an environment variable names."""
    named = os.environ.get(variable)
    return Path(named).absolute() if named else None


def why_missing(variable: str) -> str | None:
    """Return why a peer can't be measured, or None."""
    python = python_of(variable)
    if python is None:
        return f"{variable} names no Python that has it"
    return None if python.is_file() else f"{variable}={python} is not there"


def version_of(variable: str, package: str) -> str:
    """Return the version of a package in that environment."""
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    said = subprocess.run([str(python_of(variable)), "-c", ask], capture_output=True, text=True, check=True)
    return said.stdout.strip()
