"""`tokentape serve`: run the gateway. Its options are the settings of `tokentape.config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from tokentape._opening import model_folder
from tokentape.cli.extras import require
from tokentape.cli.serving import serve_alone, serve_with_workers
from tokentape.config import Resolved, resolve, settings
from tokentape.errors import InvalidRequest, TokentapeError


def serve(**params: Any) -> None:
    """Serve a model over OpenAI's and Anthropic's APIs and record its exact tokens.

    Every option can also be set in the environment or in a TOML file. `tokentape config show` with the same arguments
    prints the resulting settings and where each comes from.
    """
    config = config_of(params).config
    if config.engine.kind == "transformers":
        model_folder(config)  # first, so that a missing folder is reported before missing libraries
        try:
            require("torch", "transformers", extra="hf")
        except TokentapeError as error:
            raise TokentapeError(
                f"{error}. They are not needed with a server: tokentape serve MODEL --engine vllm --engine-url URL"
            ) from None
    (serve_alone if config.workers == 1 else serve_with_workers)(config)


def config_of(params: Mapping[str, Any]) -> Resolved:
    """Return the configuration from the parameters of `serve`, the environment and the file.

    Raises `typer.BadParameter` if they are invalid.
    """
    flags = {name.replace("__", "."): value for name, value in params.items()}
    file = flags.pop("config")
    for name, example in (("pin", "temperature=1.0"), ("default", "temperature=1.0"), ("engine.adapters", "a=runs/a")):
        for entry in flags[name] or ():
            if entry.find("=") < 1:
                raise typer.BadParameter(
                    f"{entry!r} is not NAME=VALUE; expected a value such as {example}", param_hint=settings()[name].flag
                )
        flags[name] = dict(entry.split("=", 1) for entry in flags[name] or ()) or None
    try:
        return resolve(flags, file=None if file is None else Path(file))
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from None


def config_of_serve(ctx: typer.Context) -> Resolved:
    """Return the configuration that `tokentape serve` would have with this command's extra arguments.

    Raises `click.UsageError` for arguments that `serve` does not accept.
    """
    root: Any = ctx.find_root()
    with root.command.get_command(root, "serve").make_context("serve", list(ctx.args), parent=root) as context:
        return config_of(context.params)


def _signature() -> Iterator[Parameter]:
    file = "Settings in TOML. Flags and TOKENTAPE_* variables take precedence. Default: tokentape.toml."
    yield _parameter("config", Path, typer.Option(metavar="FILE", help=file))
    for name, setting in settings().items():
        if setting.option is None:
            continue
        if name == "model":
            yield _parameter(name, Path, typer.Argument(metavar="MODEL", help=setting.help))
            continue
        kind = list[str] if setting.repeats else setting.kind
        option, flag = setting.option, setting.flag
        limits: dict[str, Any] = {"min": option.least, "max": option.most} if kind in (int, float) else {}
        flags = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
        yield _parameter(name, kind, typer.Option(flags, metavar=option.metavar, help=setting.help, **limits))


def _parameter(name: str, kind: Any, option: Any) -> Parameter:
    # No parameter has a default: a setting without a flag comes from the environment or the file.
    annotation = Annotated[kind | None, option]
    return Parameter(name.replace(".", "__"), Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


# typer makes the options from the signature: one for each setting.
serve.__signature__ = Signature(list(_signature()))  # type: ignore[attr-defined]
