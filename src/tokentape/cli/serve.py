"""`tokentape serve`: run the gateway."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokentape.cli.extras import require
from tokentape.cli.flags import config_of

if TYPE_CHECKING:
    from tokentape.config import ServeConfig


class EngineName(StrEnum):
    """What samples."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"
    OPENAI = "openai"


class ModeName(StrEnum):
    """Which log-probabilities the embedded engine reports."""

    RAW = "raw"
    SCALED = "scaled"
    PROCESSED = "processed"


class HistoryName(StrEnum):
    """What of earlier turns stays in context."""

    SAMPLED = "sampled"
    TEMPLATE = "template"


class WrongStopName(StrEnum):
    """What becomes of a turn that ended with another stop token than the template writes."""

    KEEP = "keep"
    FORK = "fork"


class OnAbortName(StrEnum):
    """What becomes of a completion that the engine aborts."""

    RESUME = "resume"
    KEEP = "keep"
    RESAMPLE = "resample"


class CheckName(StrEnum):
    """Which bridges are checked."""

    ALL = "all"
    SAMPLE = "sample"
    OFF = "off"


class Synchronous(StrEnum):
    """How often the record is flushed to the disk."""

    FULL = "full"
    NORMAL = "normal"


class LogLevel(StrEnum):
    """What is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How it is logged."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


# No parameter has a default here: what is not given is looked for in the environment and the file.
def serve(
    ctx: typer.Context,
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="Model folder: tokenizer, chat template, weights if embedded; or its name on the Hub, if the cache "
            "has it. Default if embedded: the tiny model shipped.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings in TOML. Flags and TOKENTAPE_* go first. Default: tokentape.toml."),
    ] = None,
    engine: Annotated[
        EngineName | None,
        typer.Option(help="transformers: embedded in this process, the default. Others: the server at --engine-url."),
    ] = None,
    engine_url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Base URL of the engine's server; several times for several replicas."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(file_okay=False, help="Where the record is kept. Default: runs/serve.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Keep the record in PostgreSQL instead, postgresql://user@host/database: any number of gateways may.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes that serve together, for many cores. Not for the embedded engine. Default: 1."
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one. Default: 8800.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Chat template to use instead of the model's own.")
    ] = None,
    strict_text: Annotated[
        bool | None,
        typer.Option(
            help="Keep every added token out of the text of callers, HTML tags too. Default: no, text is encoded as "
            "the tokenizer encodes it, and control tokens alone are kept out."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads of the embedded engine. Default: torch's choice; 1 for the tiny model."),
    ] = None,
    logprobs_mode: Annotated[
        ModeName | None,
        typer.Option(
            help="Embedded engine only: which log-probabilities are recorded. processed, the default: those that "
            "tokens are sampled with. scaled: those before top-p, top-k and min-p. raw: the model's own."
        ),
    ] = None,
    capture: Annotated[
        bool | None,
        typer.Option(
            help="Let the vLLM server render, and record what it rendered and where that drifts. Default: no."
        ),
    ] = None,
    verify_prompts: Annotated[
        bool | None,
        typer.Option(
            help="Have the server return the ids of every prompt, and compare them. Costs as much as sending them. "
            "Default: no, it has to count them right."
        ),
    ] = None,
    history: Annotated[
        HistoryName | None,
        typer.Option(
            help="sampled, the default: earlier turns stay as sampled. template: what the template drops of them, "
            "goes; that forks."
        ),
    ] = None,
    wrong_stop: Annotated[
        WrongStopName | None,
        typer.Option(
            help="After a stop token that the template does not write there. keep, the default: it stands for the end. "
            "fork: a new branch with the template's own."
        ),
    ] = None,
    on_abort: Annotated[
        OnAbortName | None,
        typer.Option(
            help="A reply that the engine aborts, for new weights for example. resume, the default: it goes on in the "
            "same turn where the distribution stays the same, else it is kept. keep: it is the reply as it is. "
            "resample: an error, and the caller asks again."
        ),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Sampling parameter that callers can't change, such as temperature=1.0. Several times for several.",
        ),
    ] = None,
    default: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Sampling parameter of calls that don't name it. Several times for several."
        ),
    ] = None,
    payloads: Annotated[
        bool | None, typer.Option(help="Record per-token payloads of the engine: routed experts. Default: no.")
    ] = None,
    synchronous: Annotated[
        Synchronous | None,
        typer.Option(help="full, the default: acknowledged turns survive a power cut. normal: a crash of the gateway."),
    ] = None,
    model_id: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name in replies. Default: the folder's.")
    ] = None,
    engine_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The name by which the server serves the folder's model. Default: the first it lists."
        ),
    ] = None,
    unverified_model: Annotated[
        bool | None,
        typer.Option(
            help="Serve although the server may serve another model than the folder's; every verdict says so. "
            "Default: no."
        ),
    ] = None,
    engine_api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="What the engine's server wants as API key; better in the environment."),
    ] = None,
    keys_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="API keys of callers, a line name=key for each.")
    ] = None,
    admin_keys_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="API keys that see every session and the metrics.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host that requests may be for; several times for several, * for any. Default: with keys any, "
            "without them this machine.",
        ),
    ] = None,
    max_body_bytes: Annotated[int | None, typer.Option(min=0, help="Largest request body. Default: 64 MiB.")] = None,
    max_open_sessions: Annotated[
        int | None, typer.Option(min=0, help="Sessions in memory per API key; 0, the default: any number.")
    ] = None,
    max_turns_per_session: Annotated[int | None, typer.Option(min=0, help="0, the default: any number.")] = None,
    max_resumes: Annotated[
        int | None, typer.Option(min=0, help="How often a reply goes on after an abort, then it is kept. Default: 32.")
    ] = None,
    max_calls_per_key: Annotated[
        int | None, typer.Option(min=0, help="Calls under way per API key; 0, the default: any number.")
    ] = None,
    idle_seconds: Annotated[
        float | None, typer.Option(min=0, help="Until an unused session leaves the memory. Default: 3600.")
    ] = None,
    drain_seconds: Annotated[
        float | None, typer.Option(min=0, help="How long calls may go on after SIGTERM. Default: 30.")
    ] = None,
    log_level: Annotated[LogLevel | None, typer.Option(help="Default: info.")] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="auto, the default: text on a terminal, JSON lines elsewhere.")
    ] = None,
    tracing: Annotated[bool | None, typer.Option(help="Open OpenTelemetry spans. Default: no.")] = None,
    drift_share: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Share of the completions whose drift is counted, off the way of calls. Default: 0.01."
        ),
    ] = None,
    check_bridges: Annotated[
        CheckName | None,
        typer.Option(
            help="Which bridges are compared with the template's own rendering, off the way of calls: all; sample, the "
            "default: the first of each kind on a branch, and some; off."
        ),
    ] = None,
) -> None:
    """Serve a model over OpenAI's and Anthropic's APIs; record token-exactly.

    `tokentape config show` with the same arguments prints what is in force, and where it came from.
    """
    # All of the parameters above are read from the context, as `config show` and `doctor` read them too.
    run(config_of(ctx.params).config)


def run(config: ServeConfig) -> None:
    """Serve as `config` says, until a signal."""
    if config.engine.kind == "transformers":
        require("torch", "transformers", extra="hf")

    from tokentape.cli.serving import serve_alone, serve_with_workers

    if config.workers == 1:
        serve_alone(config)
    else:
        serve_with_workers(config)
