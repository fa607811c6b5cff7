"""`tokentape doctor`: check that this machine can run a gateway with these settings."""

from __future__ import annotations

import asyncio
import difflib
import ipaddress
import os
import platform
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer

from tokentape._opening import folder_model, model_folder, open_configured, synchronous
from tokentape._session.invariants import check_completion
from tokentape._settings import env_name
from tokentape._version import __version__
from tokentape.audit._deviations import PRECISIONS
from tokentape.audit._served import CheckResult, same_template, serves_model
from tokentape.chat._certificate import Certificate
from tokentape.chat._certificate_cache import load_or_certify
from tokentape.chat._renderer import Renderer
from tokentape.cli.arguments import AsJson, option
from tokentape.cli.output import print_json, working
from tokentape.cli.serve import config_of_serve
from tokentape.config import ServeConfig, settings
from tokentape.engines._base import Engine, SamplingParams
from tokentape.engines._http import HttpClient
from tokentape.engines._identity import offered_routes
from tokentape.engines._scoring import server_scores
from tokentape.engines._vllm import WITHOUT_GENERATE
from tokentape.errors import EngineContractError, EngineError, InvalidRequest, StoreLocked, TokentapeError
from tokentape.gateway._serve import bind
from tokentape.store import SqliteStore
from tokentape.store._lock import LOCK_NAME, DirectoryLock
from tokentape.store._postgres import Durability, try_opening, without_password
from tokentape.store._sqlite import DATABASE_NAME, refuse_links
from tokentape.training._trainers import TRAINERS, served, served_to_all


def doctor(
    ctx: typer.Context,
    trainer: Annotated[
        str | None,
        option(
            "Also check that this trainer can use the recorded logprobs: agent-lightning, miles, "
            "nemo-rl, prime-rl, skyrl, slime, tinker, trl, verifiers or verl.",
            "NAME",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that `tokentape serve` can run with its arguments.

    Accepts the arguments of `tokentape serve`, for example: tokentape doctor Qwen/Qwen3-8B --engine vllm --engine-url
    http://127.0.0.1:8000 --data runs/serve. Prints ok, warn or fail for each check, and what to do. Can run while a
    gateway is running. Exits with 1 if a check fails.
    """
    if trainer is not None and trainer.lower() not in TRAINERS:
        raise typer.BadParameter(
            f"unknown trainer {trainer!r}; choose from {', '.join(sorted(TRAINERS))}", param_hint="--trainer"
        )
    config = config_of_serve(ctx).config
    findings = []
    with working("checking") as status:
        for finding in examine(config, status.update, trainer and trainer.lower()):
            findings.append(finding)
            if not as_json:
                typer.echo(f"{finding.status:<4}  {finding.name}: {finding.found}")
                if finding.advice:
                    typer.echo(f"      {finding.advice}")
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        print_json({"ok": not failed, "findings": findings})
    raise typer.Exit(1 if failed else 0)


_LIBRARIES = ("tokenizers", "jinja2", "numpy", "sqlalchemy", "starlette", "uvicorn", "transformers", "torch")
_LITTLE_SPACE = 5 * 2**30
_NO_SPACE = 2**28
_SLOW_FSYNC = 0.05
_PROBE_TOKENS = 8
_PROMPT = "The first three letters are A, B and"
_ROUNDING = 1e-2
_OWN_VARIABLES = ("TOKENTAPE_CONFIG", "TOKENTAPE_CACHE")


def examine(config: ServeConfig, progress: Callable[[str], None], trainer: str | None = None) -> Iterator[CheckResult]:
    """Check this machine, everything that `config` names, and a `trainer`. Yield each result as soon as it is known."""
    yield versions()
    yield sqlite_version(sqlite3.sqlite_version_info)
    yield from environment(os.environ)
    if config.store is None:
        yield from data_directory(config.data)
    else:
        yield database(config.store, synchronous(config))
    yield from access(config)
    progress("trying out conversations")
    try:
        model = model_folder(config)
        renderer = Renderer.load(model, config.chat_template)
        certificate = load_or_certify(renderer, {})
    except (TokentapeError, OSError) as error:
        yield CheckResult("model", "fail", str(error))
        return
    yield CheckResult("model", "ok", f"{model}, vocabulary {renderer.tokenizer.vocab_size}")
    yield certified(certificate)
    progress("asking the engine")
    yield from asyncio.run(_engine(config, renderer, trainer))


def versions() -> CheckResult:
    """Report the versions of Python and the libraries."""
    parts = [f"tokentape {__version__}", f"Python {platform.python_version()}"]
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            parts.append(f"{name} {version(name)}")
    return CheckResult("versions", "ok", ", ".join(parts))


def sqlite_version(version_info: tuple[int, ...]) -> CheckResult:
    """Check whether this SQLite version can corrupt a database that two connections write to at once."""
    text = ".".join(map(str, version_info))
    if (3, 7, 0) <= version_info < (3, 51, 3):
        text += (
            ": it has SQLite's WAL-reset bug (3.7.0 to 3.51.2), which needs two concurrent writers. A gateway has one "
            "writer at a time and locks its data directory. Let no other program write to the database"
        )
    return CheckResult("sqlite", "ok", text)


def environment(environ: Mapping[str, str]) -> Iterator[CheckResult]:
    """Yield a warning for each variable that looks like a misspelled setting."""
    names = [*map(env_name, settings()), *_OWN_VARIABLES]
    for name in environ:
        near = difflib.get_close_matches(name, names, 1, cutoff=0.85)
        if name.startswith("TOKENTAPE_") and name not in names and near:
            yield CheckResult("environment", "warn", f"{name} is not a setting", f"Did you mean {near[0]}?")


def data_directory(directory: Path) -> Iterator[CheckResult]:
    """Check that a directory can contain a record: permissions, lock, space, flushing, an existing record."""
    there = directory.resolve()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield CheckResult(
            "data", "fail", f"{there} is not a writable directory", "Change its owner, or choose a different --data."
        )
        return
    detail = f"{directory}" if there == directory.resolve() else f"{directory} will be created"
    try:
        refuse_links(directory / DATABASE_NAME)
        if (directory / LOCK_NAME).exists():
            DirectoryLock(directory).release()
        if (directory / DATABASE_NAME).exists():
            SqliteStore.open(directory, read_only=True).close()
        yield CheckResult("data", "ok", detail)
    except StoreLocked as error:
        # Without the advice for commands that have to write.
        yield CheckResult(
            "data", "warn", str(error).partition("; if ")[0], "This is fine if that process is the gateway."
        )
    except (TokentapeError, OSError) as error:
        yield CheckResult("data", "fail", str(error), "Run: tokentape verify DATA_DIR")
    free = shutil.disk_usage(there).free
    status: Literal["ok", "warn", "fail"] = "fail" if free < _NO_SPACE else "warn" if free < _LITTLE_SPACE else "ok"
    yield CheckResult("disk", status, f"{free / 2**30:.1f} GiB free", "" if status == "ok" else "Free up space.")
    yield _flushing(there)


def database(url: str, durability: Durability) -> CheckResult:
    """Check that a PostgreSQL database can hold a record: URL, permissions, a record in it. Change nothing."""
    shown = without_password(url)
    try:
        try_opening(url, durability)
    except TokentapeError as error:
        return CheckResult("store", "fail", f"{shown}: {error}", "Check the server, the user's rights and the URL.")
    return CheckResult("store", "ok", shown)


def _flushing(directory: Path) -> CheckResult:
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".tokentape-doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            took = time.perf_counter() - began
    except OSError as error:
        return CheckResult("fsync", "fail", f"{error.strerror}", "Acknowledged turns could be lost: use another disk.")
    slow = took > _SLOW_FSYNC
    advice = "Every turn waits for an fsync; a local SSD takes a few ms." if slow else ""
    return CheckResult("fsync", "warn" if slow else "ok", f"{1000 * took:.1f} ms", advice)


def access(config: ServeConfig) -> Iterator[CheckResult]:
    """Check who can reach the gateway."""
    try:
        keys = config.all_keys()
    except InvalidRequest as error:
        yield CheckResult("keys", "fail", str(error), "Correct the keys.")
        return
    try:
        address = ipaddress.ip_address("127.0.0.1" if config.host == "localhost" else config.host)
    except ValueError:
        yield CheckResult(
            "host", "fail", f"{config.host!r} is not an address of this machine", "Use 127.0.0.1 or 0.0.0.0."
        )
        return
    if not address.is_loopback and not keys:
        detail = f"others can reach {config.host}, and there are no API keys: serve refuses to start"
        yield CheckResult("host", "fail", detail, "Pass keys with --keys-file, or listen on 127.0.0.1.")
    else:
        reach = "this machine only" if address.is_loopback else "others can reach it"
        yield CheckResult("host", "ok", f"{config.host}: {reach}, {'with' if keys else 'without'} API keys")
        try:
            bind(config.host, config.port, bool(keys)).close()
        except InvalidRequest as error:
            if error.param == "port":
                yield CheckResult("port", "warn", str(error), "If it is the gateway of this record, nothing is wrong.")
            else:
                found = f"can't listen on {config.host}: {error}"
                yield CheckResult("host", "fail", found, "Use 127.0.0.1 or 0.0.0.0.")
    for path in (config.keys_file, config.admin_keys_file):
        if path is not None and stat.S_IMODE(path.stat().st_mode) & 0o077:
            yield CheckResult("keys", "warn", f"{path} can be read by other users", f"Run: chmod 600 {path}")


def certified(certificate: Certificate) -> CheckResult:
    """Report which parts of the chat template are not certified."""
    refused = [continuation.name for continuation in certificate.continuations if continuation.strategy == "refused"]
    lost = [check.name for check in certificate.parsing if check.holds is False]
    if not certificate.injection_safe:
        return CheckResult("certificate", "fail", "callers' text can become control tokens", "Choose another template.")
    both = {"refused continuations": refused, "turns not parsed back": lost}
    parts = [f"{what}: {', '.join(names)}" for what, names in both.items() if names]
    if parts:
        advice = "Requests like these fail or fork. Run: tokentape certify MODEL"
        return CheckResult("certificate", "warn", "; ".join(parts), advice)
    return CheckResult("certificate", "ok", f"{len(certificate.continuations)} continuations, all certified")


async def _engine(config: ServeConfig, renderer: Renderer, trainer: str | None) -> list[CheckResult]:
    try:
        # Report a paused server at once: `serve` would wait for it.
        at_once = replace(config, engine=replace(config.engine, wait_seconds=0))
        engine = await open_configured(at_once, renderer, check=False)
    except ImportError as error:
        advice = "Run: pip install 'tokentape[hf]'. Or use a server with --engine and --engine-url, without torch."
        return [CheckResult("engine", "fail", str(error), advice)]
    except (TokentapeError, OSError) as error:
        advice = "Check that it runs, its URL and its API key." if config.engine.urls else "Pass a different model."
        # The server answered, and the message says what is wrong with the answer.
        advice = "" if isinstance(error, EngineContractError) else advice
        return [CheckResult("engine", "fail", str(error), advice)]
    try:
        info, mode, name = engine.info, engine.info.logprobs_mode, engine.info.name
        described = f"{info}, model {Path(info.model).name}, context {info.max_context}, vocabulary {info.vocab_size}"
        findings = [CheckResult("engine", "ok", described), await probe(engine, renderer)]
        findings.append(served_to_all(mode, name) if trainer is None else served(trainer, mode, name))
        for url in config.engine.urls:
            http = HttpClient(url, api_key=config.engine.api_key, timeouts=config.engine.timeouts)
            try:
                kind, expected = config.engine.kind, config.engine.model
                findings += await serves_model(kind, http, engine.info, renderer, folder_model(config), expected)
                findings += await rescored(engine, http, renderer)
                if kind == "vllm":
                    routes = ", ".join(await offered_routes(http)) or "none"
                    advice = "" if "generate" in engine.info.capabilities else WITHOUT_GENERATE
                    findings.append(CheckResult("routes", "ok", routes, advice))
                findings.append(await same_template(kind, http, engine.info.model, renderer))
            except EngineError as error:
                advice = "Check the server's log, then run doctor again."
                findings.append(CheckResult("engine", "fail", f"{url} did not answer the checks: {error}", advice))
            finally:
                await http.close()
        return findings
    finally:
        await engine.close()


async def probe(engine: Engine, renderer: Renderer) -> CheckResult:
    """Sample greedily, twice. Each id must have a logprob and be the likeliest token."""
    prompt = np.array(renderer.tokenizer.encode_plain(_PROMPT), np.int32)
    try:
        first, again = [await _sample(engine, prompt) for _ in range(2)]
    except TokentapeError as error:
        return CheckResult("probe", "fail", str(error), "This engine's samples can't be recorded: see docs/engines.md.")
    ids, logprobs = first[0], np.array(first[1])
    detail = f"{len(ids)} tokens with their logprobs"
    if ids != again[0] or np.abs(logprobs - np.array(again[1])).max() > _ROUNDING:
        advice = (
            "Batching or kernels are not deterministic; trainers see noise in the logprobs. Recorded ids and logprobs "
            "are not affected, because they belong to the same call."
        )
        return CheckResult("probe", "warn", f"{detail}; greedy sampling differed the second time", advice)
    return CheckResult("probe", "ok", f"{detail}, the same twice")


async def rescored(engine: Engine, http: HttpClient, renderer: Renderer) -> list[CheckResult]:
    """Compare the logprobs of sampled tokens with the server's scores of the same ids, if it has scores."""
    prompt = np.array(renderer.tokenizer.encode_plain(_PROMPT), np.int32)
    try:
        ids, logprobs = await _sample(engine, prompt)
        scores = await server_scores(http, engine.info, np.array([*prompt, *ids], np.int32), len(prompt))
    except (EngineContractError, InvalidRequest) as error:
        return [CheckResult("scores", "warn", f"not compared: {error}")]
    if scores is None:
        return []
    apart, limit = float(np.abs(scores.logprobs - np.array(logprobs)).max()), PRECISIONS["bfloat16"].delta
    found = f"sampled logprobs are up to {apart:.2g} nats from the server's scores of the same ids"
    if apart <= limit:
        return [CheckResult("scores", "ok", found)]
    advice = f"Rounding explains {limit}. Record some turns, and find the cause with `tokentape score`."
    return [CheckResult("scores", "warn", found, advice)]


async def _sample(engine: Engine, prompt: np.ndarray[tuple[int], np.dtype[np.int32]]) -> tuple[list[int], list[float]]:
    tops = int("top_logprobs" in engine.info.sampling)
    params = SamplingParams(max_tokens=_PROBE_TOKENS, temperature=0.0, top_logprobs=tops)
    async with aclosing(engine.sample(prompt, params, stream=False, request_id="tokentape-doctor")) as sampled:
        deltas = [delta async for delta in sampled]
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
    check_completion(np.array(ids, np.int32), np.array(logprobs, np.float32), engine.info.vocab_size)
    best = [pairs[0][1] for delta in deltas for pairs in delta.top_logprobs if pairs]
    if best and (len(best) != len(ids) or np.abs(np.array(best) - np.array(logprobs)).max() > _ROUNDING):
        raise EngineContractError("greedy sampling did not choose the tokens with the highest reported logprobs")
    return ids, logprobs
