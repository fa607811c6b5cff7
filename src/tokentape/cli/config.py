"""`tokentape config`: show the settings that a gateway would use."""

from __future__ import annotations

import json
from typing import Any

import typer

from tokentape.cli.arguments import SAME_AS_SERVE, AsJson
from tokentape.cli.serve import config_of_serve

config = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Show the settings of a gateway."
)


@config.callback()
def _group() -> None:
    pass


@config.command(context_settings=SAME_AS_SERVE, short_help="Print every setting and where it comes from.")
def show(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Print every setting and where it comes from: flag, env, file or default.

    Accepts the arguments of `tokentape serve` and shows the settings that `serve` would use with them. Without --json
    the output is TOML. Secrets are hidden.
    """
    resolved = config_of_serve(ctx)
    shown = {name: {"value": resolved.shown(name), "source": source} for name, source in resolved.sources.items()}
    if as_json:
        file = None if resolved.file is None else str(resolved.file)
        typer.echo(json.dumps({"file": file, "settings": shown}))
        return
    typer.echo(f"# file: {resolved.file or 'none'}")
    for name, setting in shown.items():
        value = setting["value"]
        line = f"{name} = {_toml(value)}" if value is not None else f"# {name} is not set"
        typer.echo(f"{line:<48} # {setting['source']}")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(key)} = {_toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # TOML has no surrogate pairs, which JSON in ASCII needs, and no raw DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
