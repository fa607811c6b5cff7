"""The command line: subcommands, global options, and how errors are shown."""

from __future__ import annotations

import sys
import traceback
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from tokentape._version import __version__
from tokentape.cli.arguments import NOTHING_MEASURED, SAME_AS_SERVE
from tokentape.errors import NothingToMeasure, TokentapeError

# The class of typer's errors for an invalid command line. Typer does not export it.
_USAGE: Any = typer.BadParameter.__base__

_COMMANDS = {
    "Record and export": {
        "serve": "Serve a model and record its exact tokens.",
        "show": "Show who wrote which tokens of a session.",
        "view": "Look at trajectories token by token, in a browser.",
        "export": "Write trajectories to a file for a trainer.",
        "verify": "Check every hash and invariant of a record.",
        "score": "Score the recorded ids with an engine.",
        "snapshot": "Export and drop sessions of a running gateway.",
        "archive": "Archive old sessions as Parquet files with hashes.",
        "delete": "Delete sessions by metadata and age.",
        "config": "Show the settings of a gateway.",
    },
    "Check a model, a trainer, a server": {
        "doctor": "Check that `tokentape serve` can run with its arguments.",
        "certify": "Test what a model's chat template supports.",
        "audit": "Check that trainer and server produce the same ids.",
        "lock": "Freeze the ids of texts and messages in a lockfile.",
        "check": "Report what changed since a lockfile was created.",
        "check-logprobs": "Compare recorded logprobs with a trainer's.",
        "drift": "Measure how often ids change when they become text.",
        "compare": "Compare two records of token ids, row by row.",
        "probe": "Count edits that change token ids but not text.",
        "premium": "Count tokens per character and byte, by language.",
    },
    "Try": {"demo": "Run agents on a tiny model and show where ids drift."},
}
"""Commands and their short help, by group. Each command is in the module with its name, imported when it runs."""


class _Commands(TyperGroup):
    """List commands in groups, and print errors on stderr after `error:`.

    The exit code is `NOTHING_MEASURED` or 2. It is never 1, which means that a command found something.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Names and short help, for completion and suggestions. A command itself is loaded when it is used.
        for commands in _COMMANDS.values():
            self.commands.update({name: TyperCommand(name, short_help=text) for name, text in commands.items()})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _loaded(cmd_name) if cmd_name in self.commands else None

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete the names of commands without importing them."""
        names = TyperGroup(name=self.name, commands=dict(self.commands), params=self.params)
        return names.shell_complete(typer.Context(names, parent=ctx.parent, info_name=ctx.info_name), incomplete)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands by their groups, without importing them."""
        for title, commands in _COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _USAGE as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                raise
            path = ctx.command_path if error.ctx is None else error.ctx.command_path
            if getattr(error, "option_name", "") == "--record":
                error.possibilities = ["--data"]  # too different for typer's own suggestion
            typer.echo(f"error: {error.format_message()}\nSee: {path} --help", err=True)
            raise typer.Exit(2) from None
        except (TokentapeError, OSError) as error:
            if ctx.params["debug"] or isinstance(error, BrokenPipeError):
                raise
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(NOTHING_MEASURED if isinstance(error, NothingToMeasure) else 2) from None


@cache
def _loaded(name: str) -> Any:
    function = name.replace("-", "_")
    command = getattr(import_module(f"tokentape.cli.{function}"), function)
    if not isinstance(command, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        settings = SAME_AS_SERVE if name == "doctor" else None
        alone.command(name, context_settings=settings)(command)
        command = alone
    return get_command(command)


# With rich markup, the help would import rich, which takes longer than everything else.
app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"tokentape {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train on exactly the tokens your model sampled."""


def main() -> None:
    """Run the command line. Exits with 2 also after an unexpected exception, and if the reader of its output ends."""
    try:
        app(prog_name="tokentape")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            raise SystemExit(2) from None  # typer exits with 1
        raise
    except Exception:
        traceback.print_exc()
        sys.exit(2)
