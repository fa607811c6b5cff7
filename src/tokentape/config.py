"""How a gateway is to be run: one frozen tree of settings, each from a flag, the environment, a TOML file or a default.

A setting's name has dots: `limits.body_bytes` is the flag's value if there is one, else that of the environment
variable `TOKENTAPE_LIMITS_BODY_BYTES`, else `body_bytes` in the file's table `[limits]`, else the default.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from tokentape.chat.splice import History, WrongStop
from tokentape.engines.http import Timeouts
from tokentape.errors import InvalidRequest
from tokentape.gateway.keys import Keys
from tokentape.gateway.limits import CheckBridges, Limits, OnAbort
from tokentape.gateway.logs import Format, Level
from tokentape.gateway.pins import Pins
from tokentape.hub import is_hub_name
from tokentape.store.postgres import is_url, without_password

Source: TypeAlias = Literal["flag", "env", "file", "default"]

EngineKind: TypeAlias = Literal["transformers", "vllm", "sglang", "llamacpp", "openai"]

DEFAULT_FILE = Path("tokentape.toml")
"""Read if it is there and no other is named."""

SECRETS = frozenset({"keys", "admin_keys", "engine.api_key"})
"""Names of the settings that are never shown."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What samples, and where it is."""

    kind: EngineKind = "transformers"
    """`transformers` is embedded in the gateway's process; the others are servers at `urls`."""
    urls: tuple[str, ...] = ()
    """One for each replica."""
    model: str | None = None
    """The name by which the server serves the folder's model; of several that it serves, the one to sample from."""
    unverified_model: bool = False
    """Serve although the server is not known to serve the folder's model, and say so in every verdict."""
    api_key: str | None = None
    threads: int | None = None
    """CPU threads of the embedded engine."""
    logprobs_mode: Literal["raw", "scaled", "processed"] = "processed"
    """Which log-probabilities the embedded engine reports: the model's own, those after penalties and temperature, or
    those that tokens are sampled with, after truncation too. Servers have a setting of their own."""
    capture: bool = False
    """Let the server render: its prompts are recorded as they are, and where they drift. For `vllm`."""
    verify_prompts: bool = False
    """Have the server return the ids of every prompt, and compare them. Without, it has to count them right. For `vllm`
    and `sglang`."""
    timeouts: Timeouts = field(default_factory=Timeouts)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What is logged, and how."""

    level: Level = "info"
    format: Format = "auto"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All that `tokentape serve` takes."""

    model: Path | None = None
    """Model folder, or a Hub name of which the cache of this machine has the files. None: the tiny model shipped, if it
    is embedded."""
    model_id: str | None = None
    """The model's name in replies. None: the folder's."""
    chat_template: Path | None = None
    strict_text: bool = False
    """Keep every added token out of the text of callers, not control tokens only."""
    data: Path = Path("runs/serve")
    store: str | None = None
    """A database instead of the data directory: `postgresql://user@host/database`, for several gateways over it."""
    workers: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """Processes that serve together."""
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(le=65535)] = 8800
    allowed_hosts: tuple[str, ...] | None = None
    """See `create_app`."""
    history: History = "sampled"
    wrong_stop: WrongStop = "keep"
    on_abort: OnAbort = "resume"
    """What becomes of a completion that the engine aborts, for new weights for example."""
    pin: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that callers can't change, by name; see `gateway.pins`."""
    default: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of calls that name none."""
    payloads: bool = False
    """Record what the engine says of each token besides its logprob, such as routed experts."""
    synchronous: Literal["full", "normal"] = "full"
    drain_seconds: float = 30.0
    """How long calls may go on after SIGTERM."""
    tracing: bool = False
    """Open OpenTelemetry spans."""
    drift_share: Annotated[float, msgspec.Meta(le=1)] = 0.01
    """Of the completions, how many go through text and back to count drift, apart from calls. 0: none."""
    check_bridges: CheckBridges = "sample"
    """Which bridges are compared with the template's own rendering, apart from calls: `all`, `sample`, `off`."""
    keys_file: Path | None = None
    """Lines `name=key`, besides `keys`."""
    admin_keys_file: Path | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    admin_keys: Mapping[str, str] = field(default_factory=dict)
    engine: EngineConfig = field(default_factory=EngineConfig)
    limits: Limits = field(default_factory=Limits)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        self.pins()
        if (self.engine.kind == "transformers") == bool(self.engine.urls):
            raise InvalidRequest(
                f"engine {self.engine.kind!r} with {len(self.engine.urls)} URLs: a server's kind and its URL belong "
                "together, and the embedded engine has none",
                "engine",
            )
        if self.engine.capture and (self.engine.kind != "vllm" or len(self.engine.urls) != 1):
            raise InvalidRequest("capture takes one vLLM server: --engine vllm and one --engine-url", "engine.capture")
        if self.workers > 1 and self.engine.kind == "transformers":
            raise InvalidRequest(
                f"{self.workers} workers would load the weights {self.workers} times: the embedded engine takes one "
                "worker; serve the model with an engine of its own and name its --engine-url",
                "workers",
            )
        if self.store is not None and not is_url(self.store):
            raise InvalidRequest(
                "store takes postgresql://user@host:port/database; a directory is named by data", "store"
            )

    @property
    def location(self) -> str | Path:
        """Where the record is kept."""
        return self.store or self.data

    def pins(self) -> Pins:
        """The pinned and default sampling parameters. Raises `InvalidRequest` for a name or value that can't be."""
        return Pins.read(self.pin, self.default, strict=False)

    def all_keys(self) -> Keys:
        """The API keys, those in files included. Raises `InvalidRequest` as `Keys` and `read_keys`."""
        return Keys(_joined(self.keys, self.keys_file), _joined(self.admin_keys, self.admin_keys_file))


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration, and where each setting of it came from."""

    config: ServeConfig
    sources: Mapping[str, Source]
    """By the setting's name, in order."""
    file: Path | None
    """The TOML file that was read."""

    def value(self, name: str) -> Any:
        """The value of the setting with this name."""
        value: Any = self.config
        for part in name.split("."):
            value = getattr(value, part)
        return value

    def shown(self, name: str) -> Any:
        """The same for people and JSON: paths as text, secrets hidden."""
        value = self.value(name)
        if name == "store" and value:
            return without_password(value)
        if name in SECRETS and value:
            return dict.fromkeys(value, "***") if isinstance(value, Mapping) else "***"
        return str(value) if isinstance(value, Path) else value


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, file: Path | None = None) -> Resolved:
    """The configuration from `flags`, `environ` and a file.

    `flags` are settings by name, None and empty lists where one is not given. `file` None stands for the one that
    `TOKENTAPE_CONFIG` names, else for `tokentape.toml` if that is there; paths in it start at its folder. Raises
    `InvalidRequest` for a file that can't be read, for unknown names in it, and for a value that a setting can't have.
    """
    if file is None and (named := environ.get("TOKENTAPE_CONFIG")):
        file = Path(named)
    if file is None and DEFAULT_FILE.is_file():
        file = DEFAULT_FILE
    in_file = {} if file is None else _read_file(file)
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for name, kind in settings().items():
        variable = env_name(name)
        if flags.get(name) not in (None, (), []):
            sources[name] = "flag"
            values[name] = _convert(flags[name], kind, name, strict=False)
        elif variable in environ:
            sources[name] = "env"
            value = _convert(_from_text(environ[variable], kind, variable), kind, variable, strict=False)
            values[name] = value.expanduser() if isinstance(value, Path) else value
        elif name in in_file:
            assert file is not None
            sources[name] = "file"
            value = _convert(in_file[name], kind, f"{file}: {name}", strict=True)
            inside = isinstance(value, Path) and not (name == "model" and is_hub_name(value))
            values[name] = file.parent / value.expanduser() if inside else value
        else:
            sources[name] = "default"
    try:
        return Resolved(_build(ServeConfig, values, ""), sources, file)
    except ValueError as error:
        raise error if isinstance(error, InvalidRequest) else InvalidRequest(str(error)) from None


@cache
def settings() -> Mapping[str, Any]:
    """The type of each setting, by its name."""
    return dict(_walk(ServeConfig, ""))


def env_name(name: str) -> str:
    """The environment variable of a setting.

    >>> env_name("limits.body_bytes")
    'TOKENTAPE_LIMITS_BODY_BYTES'
    """
    return "TOKENTAPE_" + name.replace(".", "_").upper()


def read_keys(path: Path) -> dict[str, str]:
    """API keys by name from a file with lines `name=key`; `#` begins a comment line. Raises `InvalidRequest`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the keys in {path} can't be read: {_reason(error)}", "keys_file") from None
    return _named_keys([line for line in lines if line.strip() and not line.lstrip().startswith("#")], str(path))


def _walk(kind: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, inner in get_type_hints(kind, include_extras=True).items():
        if is_dataclass(inner):
            yield from _walk(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, inner


def _build(kind: Any, values: Mapping[str, Any], prefix: str) -> Any:
    given = {}
    for one in fields(kind):
        name = prefix + one.name
        inner = get_type_hints(kind)[one.name]
        if is_dataclass(inner):
            given[one.name] = _build(inner, values, f"{name}.")
        elif name in values:
            given[one.name] = values[name]
    return kind(**given)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} can't be read: {_reason(error)}", "config") from None
    found: dict[str, Any] = {}
    unknown: list[str] = []
    _flatten(table, "", found, unknown)
    if unknown:
        raise InvalidRequest(f"{path}: there is no setting {', '.join(map(_with_nearest, unknown))}", "config")
    return found


def _flatten(table: Mapping[str, Any], prefix: str, found: dict[str, Any], unknown: list[str]) -> None:
    for key, value in table.items():
        name = prefix + key
        if name in settings():
            found[name] = value
        elif isinstance(value, dict) and any(known.startswith(f"{name}.") for known in settings()):
            _flatten(value, f"{name}.", found, unknown)
        else:
            unknown.append(name)


def _with_nearest(name: str) -> str:
    near = difflib.get_close_matches(name, settings(), 1) or [
        known for known in settings() if known.rpartition(".")[2] == name.rpartition(".")[2]
    ]
    return f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")


def _from_text(text: str, kind: Any, variable: str) -> Any:
    """What an environment variable says, for a setting of this type: lists are separated by commas."""
    shapes = {get_origin(one) for one in (kind, *get_args(kind))}
    if not shapes & {Mapping, tuple}:
        return text
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return _named_keys(parts, variable) if Mapping in shapes else parts


def _named_keys(entries: list[str], where: str) -> dict[str, str]:
    keys: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        name, equals, key = (part.strip() for part in entry.partition("="))
        # Neither is repeated: a line without "=" may be a key.
        if not equals or name in keys:
            what = "has no '='" if not equals else "has the name of another"
            raise InvalidRequest(f"{where}: entry {number} {what}; expected name=key", "keys")
        keys[name] = key
    return keys


def _joined(keys: Mapping[str, str], path: Path | None) -> dict[str, str]:
    in_file = {} if path is None else read_keys(path)
    if twice := sorted(in_file.keys() & keys.keys()):
        raise InvalidRequest(f"{path} names keys that are given elsewhere too: {', '.join(twice)}", "keys_file")
    return {**keys, **in_file}


def _convert(value: Any, kind: Any, where: str, *, strict: bool) -> Any:
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise InvalidRequest(f"{where}: expected one of {', '.join(get_args(kind))}", where)
    try:
        found = msgspec.convert(value, kind, strict=strict, dec_hook=lambda wanted, given: wanted(given))
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(f"{where}: {str(error)[:1].lower()}{str(error)[1:]}", where) from None
    if isinstance(found, int | float) and not 0 <= found < math.inf:
        raise InvalidRequest(f"{where}: expected a number that is not negative", where)
    return found


def _reason(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
