"""The configuration of a gateway: a frozen tree of settings from flags, the environment, a TOML file and defaults.

Settings have dotted names. `limits.body_bytes` comes from its flag if set, else from the environment variable
`TOKENTAPE_LIMITS_BODY_BYTES`, else from `body_bytes` in the file's table `[limits]`, else from the default.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_origin

from tokentape._hub import is_hub_name
from tokentape._settings import Setting, build, env_name, option, walk
from tokentape.chat._splice import History, StopMismatch
from tokentape.engines._base import Dtype, Timeouts
from tokentape.engines._kinds import KINDS, EngineKind
from tokentape.errors import InvalidRequest
from tokentape.gateway._keys import Keys
from tokentape.gateway._limits import CheckBridges, Limits, OnAbort
from tokentape.gateway._logs import Format, Level
from tokentape.gateway._pins import Pins
from tokentape.store._postgres import is_url, without_password

Source: TypeAlias = Literal["flag", "env", "file", "default"]

DEFAULT_FILE = Path("tokentape.toml")
"""The file that is read if it exists and no other file is named."""

SECRETS = frozenset({"keys", "admin_keys", "engine.api_key"})
"""Settings that are never shown."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine that samples, and its URL."""

    kind: EngineKind = option(
        "transformers", "transformers: run in this process. Others: use the server at --engine-url.", "--engine"
    )
    urls: tuple[str, ...] = option(
        (), "Base URL of the engine's server. Repeat the flag for several replicas.", "--engine-url", "URL"
    )
    model: str | None = option(
        None, "Name of the folder's model on the server. Default: the first that it lists.", "--engine-model", "NAME"
    )
    unverified_model: bool = option(
        False, "Serve even if the server may serve a different model. Every verdict then says so."
    )
    api_key: str | None = option(
        None, "API key for the engine's server. Better set in the environment.", "--engine-api-key", "KEY"
    )
    threads: int | None = option(
        None, "CPU threads of the embedded engine. Default: torch's choice; 1 for the tiny model.", least=1
    )
    device: str | None = option(
        None,
        "torch device of the embedded engine, such as cpu or cuda:1. Default: the first CUDA GPU if there is one, else "
        "the CPU; the CPU for the tiny model.",
        metavar="DEVICE",
    )
    dtype: Dtype | None = option(
        None,
        "Type of weights and computation of the embedded engine. Only float32 logprobs can be recomputed to 1e-4. "
        "Default: float32.",
    )
    logprobs_mode: Literal["raw", "scaled", "processed"] | None = option(
        None,
        "Which logprobs the embedded engine reports. processed: those that tokens are sampled with. scaled: those "
        "before top-p, top-k and min-p. raw: the model's own. For a server, set this at the server. Default: "
        "processed.",
    )
    adapters: Mapping[str, str] = option(
        {}, "LoRA adapter for the embedded engine. Sessions pin it by its name.", "--adapter", "NAME=FOLDER"
    )
    capture: bool = option(False, "Let the vLLM server render the prompts. Record them, and where they drift.")
    verify_prompts: bool = option(
        False,
        "Have vLLM or SGLang return the ids of every prompt and compare them, which costs as much as sending them. "
        "Without it only their number is compared.",
    )
    wait_seconds: float = option(
        300.0, "Seconds to wait at startup until the engine's server answers.", "--engine-wait"
    )
    timeouts: Timeouts = field(default_factory=Timeouts)


_EMBEDDED_ONLY = {
    "threads": ("--threads", "choose the threads at {server}"),
    "device": ("--device", "choose the device at {server}"),
    "dtype": ("--dtype", "set it at {server} (vllm serve and SGLang have their own --dtype)"),
    "logprobs_mode": ("--logprobs-mode", "set it at {server} (vllm serve has its own --logprobs-mode)"),
    "adapters": ("--adapter", "load the adapter at {server} and pin its name"),
}
"""Settings of the embedded engine: the flag, and what to do with a server."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Log level and format."""

    level: Level = option("info", "Lowest level that is logged.", "--log-level")
    format: Format = option("text", "json: one JSON object per line, for log collectors.", "--log-format")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All settings of `tokentape serve`. Raises `InvalidRequest` if they contradict each other."""

    model: Path | None = option(
        None,
        "Model folder with tokenizer and chat template, and weights for the embedded engine; or a Hub repo id that is "
        "in this machine's cache. Default for the embedded engine: the shipped tiny model.",
    )
    model_id: str | None = option(None, "Name of the model in replies. Default: the folder's name.", metavar="NAME")
    chat_template: Path | None = option(None, "Chat template to use instead of the model's own.")
    strict_text: bool = option(
        False,
        "Keep every added token, also HTML tags, out of callers' text. Without it only control tokens are kept out, "
        "and other text is encoded as the tokenizer encodes it.",
    )
    data: Path = option(Path("runs/serve"), "Directory of the record.")
    store: str | None = option(
        None,
        "Keep the record in PostgreSQL instead: postgresql://user@host/database. Several gateways can share it.",
        metavar="URL",
    )
    workers: int = option(1, "Number of processes that serve. Not with the embedded engine.", least=1, most=1024)
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8800, "Port to listen on; 0 chooses a free one.", most=65535)
    allowed_hosts: tuple[str, ...] | None = option(
        None,
        "Host name that requests may use. Repeat the flag for several; * allows any. Default: any with API keys, "
        "otherwise only this machine.",
        "--allowed-host",
        "NAME",
    )
    history: History = option(
        "sampled",
        "Which part of earlier turns stays in context. sampled: everything that was sampled. template: what the chat "
        "template keeps; if it drops something, a new branch starts.",
    )
    stop_mismatch: StopMismatch = option(
        "keep",
        "What to do when a turn ended with a different stop token than the template renders. keep: keep the token. "
        "fork: start a new branch with the template's token.",
    )
    on_abort: OnAbort = option(
        "resume",
        "What to do with a completion that the engine aborts, for example for new weights. resume: continue it in the "
        "same turn if its distribution stays the same, otherwise keep it. keep: return it as it is. resample: return "
        "an error, so that the caller retries.",
    )
    pin: Mapping[str, Any] = option(
        {}, "Sampling parameter that callers can't change, such as temperature=1.0.", metavar="NAME=VALUE"
    )
    default: Mapping[str, Any] = option({}, "Sampling parameter for calls that don't set it.", metavar="NAME=VALUE")
    enforce_tools: bool = option(
        False,
        "Enforce forced tool choices and strict tools in the engine, and refuse them if it can't. Without it they are "
        "only reported. The logprobs of such turns are those under the constraint. Not with capture.",
    )
    payloads: bool = option(False, "Record what the engine returns per token, such as routed experts.")
    payloads_to: str | None = option(
        None,
        "Write payloads and supports to files in this folder or at this fsspec URL (s3://bucket/run), and only the "
        "files' URLs to the record. A turn is acknowledged after its files are written.",
        metavar="URL",
    )
    supports: int = option(
        0,
        "Record which ids truncated sampling (top-k, top-p, min-p) kept for each token, if it kept at most this many; "
        "0 records none. Trainers need them to compute the logprobs that the tokens were sampled with.",
        least=0,
    )
    synchronous: Literal["full", "normal"] = option(
        "full", "full: acknowledged turns survive a power cut. normal: they survive a crash of the gateway."
    )
    drain_seconds: float = option(30.0, "Seconds that calls may continue after SIGTERM.")
    tracing: bool = option(False, "Open OpenTelemetry spans.")
    drift_share: float = option(
        0.01, "Fraction of completions to re-tokenize in the background for drift metrics.", most=1
    )
    check_bridges: CheckBridges = option(
        "sample",
        "Which bridges (the ids appended after a turn) to compare in the background with the template's own rendering. "
        "sample: the first of each kind on a branch, and some more.",
    )
    keys_file: Path | None = option(None, "File with callers' API keys, one line name=key for each.")
    admin_keys_file: Path | None = option(None, "File with API keys that can read every session and the metrics.")
    keys: Mapping[str, str] = field(default_factory=dict)
    admin_keys: Mapping[str, str] = field(default_factory=dict)
    engine: EngineConfig = field(default_factory=EngineConfig)
    limits: Limits = field(default_factory=Limits)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        self.pins()
        if self.payloads_to is not None and not (self.payloads or self.supports):
            raise InvalidRequest("payloads_to has nothing to write: add --payloads or --supports", "payloads_to")
        if self.enforce_tools and self.engine.capture:
            raise InvalidRequest("enforce_tools does not work with capture: leave one of them out", "enforce_tools")
        if self.engine.kind == "transformers" and self.engine.urls:
            raise InvalidRequest(
                f"--engine-url {self.engine.urls[0]} without the kind of its server: add --engine {' or '.join(KINDS)}",
                "engine",
            )
        if self.engine.kind != "transformers" and not self.engine.urls:
            raise InvalidRequest(
                f"--engine {self.engine.kind} without the URL of the server: add --engine-url http://host:port",
                "engine",
            )
        if self.engine.kind != "transformers":
            for name, (flag, at_the_server) in _EMBEDDED_ONLY.items():
                if getattr(self.engine, name):
                    raise InvalidRequest(
                        f"{flag} applies only to the embedded engine. Leave it out, and "
                        + at_the_server.format(server=f"the {self.engine.kind} server"),
                        f"engine.{name}",
                    )
        if self.engine.capture and (self.engine.kind != "vllm" or len(self.engine.urls) != 1):
            raise InvalidRequest("capture needs one vLLM server: --engine vllm and one --engine-url", "engine.capture")
        if self.workers > 1 and self.engine.kind == "transformers":
            raise InvalidRequest(
                f"{self.workers} workers would load the weights {self.workers} times. Use one worker with the embedded "
                "engine, or serve the model with an engine server and pass its --engine-url",
                "workers",
            )
        if self.store is not None and not is_url(self.store):
            raise InvalidRequest(
                "store must be postgresql://user@host:port/database; for a directory, use data", "store"
            )

    @property
    def location(self) -> str | Path:
        """The location of the record."""
        return self.store or self.data

    def pins(self) -> Pins:
        """Return the pinned and default sampling parameters. Raises `InvalidRequest` for an invalid name or value."""
        return Pins.read(self.pin, self.default, strict=False)

    def all_keys(self) -> Keys:
        """Return the API keys, including those in files. Raises `InvalidRequest` if a file, name or key is invalid."""
        return Keys(_joined(self.keys, self.keys_file), _joined(self.admin_keys, self.admin_keys_file))


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration with the source of each setting."""

    config: ServeConfig
    sources: Mapping[str, Source]
    """Source by setting name, in order."""
    file: Path | None
    """The TOML file that was read."""

    def value(self, name: str) -> Any:
        """Return the value of a setting."""
        value: Any = self.config
        for part in name.split("."):
            value = getattr(value, part)
        return value

    def shown(self, name: str) -> Any:
        """Return a printable value of a setting: paths as text, secrets hidden."""
        value = self.value(name)
        if name == "store" and value:
            return without_password(value)
        if name in SECRETS and value:
            return dict.fromkeys(value, "***") if isinstance(value, Mapping) else "***"
        return str(value) if isinstance(value, Path) else value


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, file: Path | None = None) -> Resolved:
    """Return the configuration from `flags`, `environ` and a file.

    `flags` are settings by name; a flag that is not set is None or empty. By default `file` is the path in
    `TOKENTAPE_CONFIG`, else `tokentape.toml` if it exists. Paths in the file are relative to its folder. Raises
    `InvalidRequest` if the file can't be read or has unknown names, and for invalid values.
    """
    if file is None and (path := environ.get("TOKENTAPE_CONFIG")):
        file = Path(path)
    if file is None and DEFAULT_FILE.is_file():
        file = DEFAULT_FILE
    in_file = {} if file is None else _read_file(file)
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for name, setting in settings().items():
        variable = env_name(name)
        if flags.get(name) not in (None, (), []):
            sources[name] = "flag"
            values[name] = setting.convert(flags[name], name, strict=False)
        elif variable in environ:
            sources[name] = "env"
            value = setting.convert(_from_text(environ[variable], setting, variable), variable, strict=False)
            values[name] = value.expanduser() if isinstance(value, Path) else value
        elif name in in_file:
            assert file is not None
            sources[name] = "file"
            value = setting.convert(in_file[name], f"{file}: {name}", strict=True)
            inside = isinstance(value, Path) and not (name == "model" and is_hub_name(value))
            values[name] = file.parent / value.expanduser() if inside else value
        else:
            sources[name] = "default"
    try:
        return Resolved(build(ServeConfig, values), sources, file)
    except ValueError as error:
        raise error if isinstance(error, InvalidRequest) else InvalidRequest(str(error)) from None


@cache
def settings() -> Mapping[str, Setting]:
    """Return the settings by name."""
    return {setting.name: setting for setting in walk(ServeConfig())}


def read_keys(path: Path) -> dict[str, str]:
    """Return the API keys in a file with lines `name=key` and `#` comments, at least one. Raises `InvalidRequest`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the keys in {path} can't be read: {_reason(error)}", "keys_file") from None
    entries = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not entries:
        # Without keys, every client would have full access.
        raise InvalidRequest(f"{path} has no keys; expected lines name=key, or start without this file", "keys_file")
    return _named_keys(entries, str(path))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} can't be read: {_reason(error)}", "config") from None
    values: dict[str, Any] = {}
    unknown: list[str] = []
    _flatten(table, "", values, unknown)
    if unknown:
        raise InvalidRequest(f"{path}: unknown settings: {', '.join(map(_with_nearest, unknown))}", "config")
    return values


def _flatten(table: Mapping[str, Any], prefix: str, values: dict[str, Any], unknown: list[str]) -> None:
    for key, value in table.items():
        name = prefix + key
        if name in settings():
            values[name] = value
        elif isinstance(value, dict) and any(setting.startswith(f"{name}.") for setting in settings()):
            _flatten(value, f"{name}.", values, unknown)
        else:
            unknown.append(name)


def _with_nearest(name: str) -> str:
    if inside := [setting for setting in settings() if setting.startswith(f"{name}.")]:
        return f"{name!r} (it is a table; its settings: {', '.join(inside)})"
    near = difflib.get_close_matches(name, settings(), 1) or [
        setting for setting in settings() if setting.rpartition(".")[2] == name.rpartition(".")[2]
    ]
    return f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")


def _from_text(text: str, setting: Setting, variable: str) -> Any:
    """Parse an environment variable; commas separate the entries of a list."""
    if not setting.repeats:
        return text
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return _named_keys(parts, variable) if get_origin(setting.kind) is Mapping else parts


def _named_keys(entries: list[str], where: str) -> dict[str, str]:
    keys: dict[str, str] = {}
    for number, entry in enumerate(entries, 1):
        name, equals, key = (part.strip() for part in entry.partition("="))
        # The message does not quote the entry, because a line without "=" may be a key.
        if not equals or name in keys:
            what = "has no '='" if not equals else "repeats a name"
            raise InvalidRequest(f"{where}: entry {number} {what}; expected name=key", "keys")
        keys[name] = key
    return keys


def _joined(keys: Mapping[str, str], path: Path | None) -> dict[str, str]:
    in_file = {} if path is None else read_keys(path)
    if twice := sorted(in_file.keys() & keys.keys()):
        raise InvalidRequest(f"{path} has keys that are also set elsewhere: {', '.join(twice)}; keep one", "keys_file")
    return {**keys, **in_file}


def _reason(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
