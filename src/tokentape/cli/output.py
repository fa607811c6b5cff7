"""Print what a command found as JSON."""

from __future__ import annotations

from typing import Any

import typer


def print_json(value: Any) -> None:
    """Print dataclasses, mappings and sequences as one line of ASCII JSON. NaN becomes null."""
    from tokentape.audit.report import json_text

    typer.echo(json_text(value))
