"""From the command line of `tokentape serve` to its configuration, for every command that takes the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from tokentape.config import Resolved

SETTINGS = {
    "model": "model",
    "model_id": "model_id",
    "chat_template": "chat_template",
    "engine": "engine.kind",
    "engine_url": "engine.urls",
    "engine_model": "engine.model",
    "unverified_model": "engine.unverified_model",
    "engine_api_key": "engine.api_key",
    "threads": "engine.threads",
    "logprobs_mode": "engine.logprobs_mode",
    "capture": "engine.capture",
    "verify_prompts": "engine.verify_prompts",
    "data": "data",
    "store": "store",
    "workers": "workers",
    "host": "host",
    "port": "port",
    "allowed_host": "allowed_hosts",
    "history": "history",
    "wrong_stop": "wrong_stop",
    "on_abort": "on_abort",
    "pin": "pin",
    "default": "default",
    "payloads": "payloads",
    "synchronous": "synchronous",
    "keys_file": "keys_file",
    "admin_keys_file": "admin_keys_file",
    "max_body_bytes": "limits.body_bytes",
    "max_open_sessions": "limits.open_sessions",
    "max_turns_per_session": "limits.turns_per_session",
    "max_resumes": "limits.resumes",
    "max_calls_per_key": "limits.calls_per_key",
    "idle_seconds": "limits.idle_seconds",
    "drain_seconds": "drain_seconds",
    "log_level": "log.level",
    "log_format": "log.format",
    "tracing": "tracing",
    "drift_share": "drift_share",
    "check_bridges": "check_bridges",
}
"""The setting that each parameter of `serve` gives."""

SAME_AS_SERVE = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that takes the arguments of `serve` besides its own."""


def config_of(params: Mapping[str, Any]) -> Resolved:
    """The configuration that the parameters of `serve` make with the environment and the file.

    Raises `typer.BadParameter` if they make none.
    """
    from tokentape.config import resolve
    from tokentape.errors import InvalidRequest

    flags = {setting: params[name] for name, setting in SETTINGS.items()}
    for name in ("pin", "default"):
        flags[name] = _named(flags[name], name)
    file = params["config"]
    try:
        return resolve(flags, file=None if file is None else Path(file))
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from None


def _named(entries: list[str] | None, flag: str) -> dict[str, str] | None:
    """Values by name, of `NAME=VALUE` entries. Raises `typer.BadParameter`."""
    for entry in entries or ():
        if "=" not in entry:
            raise typer.BadParameter(f"{entry!r} is no NAME=VALUE, temperature=1.0 for example", param_hint=f"--{flag}")
    return dict(entry.split("=", 1) for entry in entries) if entries else None


def config_of_serve(ctx: typer.Context) -> Resolved:
    """The configuration that `tokentape serve` would have with the arguments that this command has left over.

    Raises `click.UsageError` for what `serve` does not take.
    """
    root = ctx.find_root().command
    assert isinstance(root, typer.core.TyperGroup)
    with root.commands["serve"].make_context("serve", list(ctx.args), parent=ctx.find_root()) as serve:
        return config_of(serve.params)
