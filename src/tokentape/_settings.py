"""Declare settings as dataclass fields with a default, a help text and a command-line flag."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from tokentape.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Option:
    """The command-line option of a setting."""

    help: str
    flag: str | None
    metavar: str | None
    least: int
    most: float | None


def option(
    default: Any,
    help: str,  # noqa: A002
    flag: str | None = None,
    metavar: str | None = None,
    *,
    least: int = 0,
    most: float | None = None,
) -> Any:
    """Return a dataclass field with an `Option`. Without `flag`, the flag of a field `some_name` is `--some-name`."""
    metadata = {"option": Option(help, flag, metavar, least, most)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in a tree of dataclasses, by its dotted name."""

    name: str
    annotation: Any
    kind: Any
    """`annotation` without None."""
    default: Any
    option: Option | None
    """None for a setting without a flag."""

    @property
    def repeats(self) -> bool:
        """Whether the setting accepts several values."""
        return get_origin(self.kind) in (tuple, Mapping)

    @property
    def flag(self) -> str:
        """The flag, for example `--engine-url`."""
        flag = self.option.flag if self.option else None
        return flag or "--" + self.name.rpartition(".")[2].replace("_", "-")

    @property
    def help(self) -> str:
        """The help of the option, with the default."""
        help_text, default = self.option.help if self.option else "", self.default
        if default in (None, ()) or isinstance(default, Mapping) or "Default: " in help_text:
            return help_text
        if isinstance(default, bool):
            default = "yes" if default else "no"
        return (
            f"{help_text} Default: {default:g}." if isinstance(default, float) else f"{help_text} Default: {default}."
        )

    def convert(self, value: Any, where: str, *, strict: bool) -> Any:
        """Convert `value` to the setting's type. Raises `InvalidRequest` with a message that begins with `where`."""
        if get_origin(self.kind) is Literal and value not in get_args(self.kind):
            raise InvalidRequest(f"{where}: expected one of {', '.join(get_args(self.kind))}", where)
        annotation = self.annotation
        if self.kind in (int, float):
            least, most = (self.option.least, self.option.most) if self.option else (0, None)
            # Infinity is not accepted.
            most = sys.float_info.max if most is None and self.kind is float else most
            annotation = Annotated[self.kind, msgspec.Meta(ge=least, le=most)]
        try:
            return msgspec.convert(value, annotation, strict=strict, dec_hook=_from_text)
        except (msgspec.ValidationError, TypeError) as error:
            raise InvalidRequest(f"{where}: {str(error)[:1].lower()}{str(error)[1:]}", where) from None


def _from_text(kind: type[Any], raw: Any) -> Any:
    """Convert `raw` to a type that msgspec does not know, such as Path, which files and variables write as text."""
    return raw if isinstance(raw, kind) else kind(msgspec.convert(raw, str))


def env_name(name: str) -> str:
    """Return the environment variable of a setting.

    >>> env_name("limits.body_bytes")
    'TOKENTAPE_LIMITS_BODY_BYTES'
    """
    return "TOKENTAPE_" + name.replace(".", "_").upper()


def walk(config: Any, prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a dataclass of defaults and of its nested dataclasses."""
    kinds = get_type_hints(type(config))
    for member in fields(config):
        default, kind = getattr(config, member.name), kinds[member.name]
        if is_dataclass(kind):
            yield from walk(default, f"{prefix}{member.name}.")
            continue
        inner = [arg for arg in get_args(kind) if arg is not type(None)]
        bare = inner[0] if len(inner) < len(get_args(kind)) else kind
        yield Setting(prefix + member.name, kind, bare, default, member.metadata.get("option"))


def build(kind: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Build a tree of dataclasses from values by dotted name. Missing values have their defaults."""
    arguments = {}
    for name, inner in get_type_hints(kind).items():
        if is_dataclass(inner):
            arguments[name] = build(inner, values, f"{prefix}{name}.")
        elif prefix + name in values:
            arguments[name] = values[prefix + name]
    return kind(**arguments)
