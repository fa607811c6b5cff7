"""Arguments shared by several subcommands."""

from __future__ import annotations

import json
import re
from math import isnan
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

NOTHING_MEASURED = 3
"""The exit code of a command that found nothing to measure. CI must not treat it as success."""

SAME_AS_SERVE = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that also accepts the arguments of `serve`."""


def record(value: str) -> str:
    """Return `value` if it is a URL or a folder. Otherwise raises `BadParameter`."""
    from tokentape.store._location import EXPECTED, is_record

    if not is_record(value):
        problem = "is a file" if Path(value).exists() else "does not exist"
        raise typer.BadParameter(f"{value!r} {problem}; expected {EXPECTED}.")
    return value


def there(value: str) -> str:
    """Return `value` if it is the location of a record or of an existing file. Otherwise raises `BadParameter`."""
    from tokentape.store._location import EXPECTED, is_record

    if not is_record(value) and not Path(value).exists():
        raise typer.BadParameter(f"{value!r} does not exist; expected {EXPECTED}, or a file.")
    return value


def option(help: str, metavar: str | None = None, *flags: str, **settings: Any) -> Any:  # noqa: A002
    """Return an option. By default its flag is the name of the parameter."""
    return typer.Option(*flags, metavar=metavar, help=help, **settings)


def number(help: str, metavar: str | None = None, **settings: Any) -> Any:  # noqa: A002
    """Return an option for a float that is not NaN, because a check against a limit of NaN can't fail."""
    return option(help, metavar, callback=_not_nan, **settings)


def _not_nan(value: float | None) -> float | None:
    if value is not None and isnan(value):
        raise typer.BadParameter("nan is not a number.")
    return value


def flag(help: str, *flags: str) -> Any:  # noqa: A002
    """Return an option without a value. Unless `flags` are given, there is also a `--no-` form."""
    return typer.Option(*flags, help=help)


def _named_folder(value: str) -> tuple[str, Path]:
    name, _, folder = value.partition("=")
    if not (name and folder and Path(folder).is_dir()):
        raise typer.BadParameter(f"{value!r} is not NAME=FOLDER with an existing folder; for example, a=runs/a.")
    return name, Path(folder)


Adapter: TypeAlias = Annotated[
    Any,
    option(
        "LoRA adapter to use: its name in the record, and its folder. Turns of other adapters are left out.",
        "NAME=FOLDER",
        "--adapter",
        parser=_named_folder,
    ),
]


def existing_file(help: str, metavar: str | None = None) -> Any:  # noqa: A002
    """Return an option for an input file."""
    return typer.Option(metavar=metavar, exists=True, dir_okay=False, help=help)


def existing_folder(help: str, metavar: str | None = None, *flags: str) -> Any:  # noqa: A002
    """Return an option for an input folder."""
    return typer.Option(*flags, metavar=metavar, exists=True, file_okay=False, help=help)


def new_file(help: str, *flags: str) -> Any:  # noqa: A002
    """Return an option for an output file."""
    return typer.Option(*flags, metavar="FILE", dir_okay=False, help=help, callback=_no_folder)


def _no_folder(value: Path | None) -> Path | None:
    # The path of an empty text is the current folder.
    if value is not None and value.is_dir():
        raise typer.BadParameter(f"{str(value)!r} is a folder; expected the name of a file.")
    return value


StoreLocation: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        callback=record,
        help="Data directory (--data) of a gateway, running or not, postgresql://user@host/database, or an archive.",
    ),
]

ANY_RECORD = "Record of a gateway, running or not: a data directory, postgresql://user@host/database or an archive."
"""The first part of the help for an argument that is a record or a file."""


def record_or_file(file: str) -> Any:
    """Return an argument for a record or a file. `file` is the help text for the file."""
    return typer.Argument(metavar="STORE_OR_FILE", callback=there, help=f"{ANY_RECORD} Or {file}")


def model_folder(help: str, metavar: str = "MODEL") -> Any:  # noqa: A002
    """Return an argument for a model folder."""
    return typer.Argument(metavar=metavar, callback=_folder, help=help)


def _folder(value: Any) -> Any:
    for path in value if isinstance(value, list) else [value]:
        if path is not None and not path.is_dir():
            raise typer.BadParameter(
                f"{str(path)!r} is not a folder. Pass a model folder on this machine: nothing is downloaded. It needs "
                "a tokenizer and a chat template, but no weights."
            )
    return value


CiFormat: TypeAlias = Annotated[
    Literal["text", "junit", "sarif", "github"],
    option("What to print: text, or findings for a CI system.", None, "--format"),
]
GatewayUrl: TypeAlias = Annotated[
    str | None, option("Base URL of the gateway, if one has this data directory open.", "URL")
]
AdminKey: TypeAlias = Annotated[
    str | None, option("Admin key; better set in the environment.", "KEY", "--api-key", envvar="TOKENTAPE_API_KEY")
]
AsJson: TypeAlias = Annotated[bool, flag("Print JSON.", "--json")]
HtmlFile: TypeAlias = Annotated[Path | None, new_file("Also write the report as one HTML file.", "--html")]
EngineKey: TypeAlias = Annotated[
    str | None, option("API key of the server.", None, "--api-key", envvar="TOKENTAPE_ENGINE_API_KEY")
]
TemplateFile: TypeAlias = Annotated[Path | None, existing_file("Chat template to use instead of the model's own.")]
TemplateKwargs: TypeAlias = Annotated[
    str, option("Template kwargs, such as '{\"enable_thinking\": false}'.", "JSON", "--kwargs")
]
TokenizerFolder: TypeAlias = Annotated[
    Path | None, existing_folder("Model folder. Default: the one that the record names.", "FOLDER")
]
IdsColumn: TypeAlias = Annotated[
    str | None, option("Column of ids, if the file has a different format. Default: token_ids...", "NAME")
]
MaskColumn: TypeAlias = Annotated[
    str | None, option("Column with 1 per sampled token. Default: loss_mask..., or all.", "NAME")
]
NameColumn: TypeAlias = Annotated[str | None, option("Column with the names of rows.", "NAME")]


def age(text: str, name: str) -> float:
    """Return an age such as 30d in seconds. Raises `BadParameter`."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is not an age; expected a number and s, m, h or d, such as 30d.", param_hint=name
        )
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def json_object(text: str, name: str) -> dict[str, Any]:
    """Return the JSON object in an option. Raises `BadParameter`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"expected a JSON object, found {text}: {error}", param_hint=name) from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"expected a JSON object, found {text}", param_hint=name)
    return value
