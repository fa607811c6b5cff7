"""Write the reference pages that are tables of what the code has: HTTP API, settings, errors, metrics, verdicts.

    python scripts/reference_tables.py

`tests/docs/test_reference_tables.py` fails if a page is old.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from unittest.mock import MagicMock

from tokentape import errors
from tokentape._session import verdict
from tokentape._settings import env_name
from tokentape.config import SECRETS, settings
from tokentape.engines import Timeouts
from tokentape.gateway._app import create_app
from tokentape.gateway._limits import Limits
from tokentape.gateway._openapi import ApiRoute
from tokentape.gateway._telemetry import Metrics

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

ADVICE = {
    "TokentapeError": "Report it, with the log lines of the request id.",
    "InvalidRequest": "Change the parameter that `param` names.",
    "NothingToMeasure": "Pass a record, file or server with something to measure. Exit code 3.",
    "ContextTooLong": "Shorten the conversation, or start the server with a longer context.",
    "UnsupportedParameter": "Leave the parameter out, or use an engine that supports it.",
    "IdempotencyMismatch": "Use a new key for a different body.",
    "Unauthorized": "Send a key from the gateway's keys file.",
    "Forbidden": "Use an admin key, or a host name in `allowed_hosts`.",
    "NotFound": "Check the path, and that the session belongs to the same key.",
    "Conflict": "Use a different session id, or leave it out.",
    "CommitRace": "Retry: the reply is recorded.",
    "TooLarge": "Send less, or raise `limits.body_bytes`.",
    "WrongContentType": "Send `Content-Type: application/json`, and the body uncompressed.",
    "HeadersTooLarge": "Send shorter headers.",
    "TemplateRefused": "`tokentape certify MODEL` shows what the template accepts.",
    "LimitReached": "Wait `retry_after` seconds, or raise the limit.",
    "TokenizerUnusable": "Pass a folder with tokenizer.json and a chat template.",
    "TokenizationChanged": "Check `report`; create a new lockfile if the change is intended.",
    "InvariantViolation": "Report this bug. The turn was not recorded.",
    "EngineError": "Check the engine's log, then retry.",
    "EngineContractError": "Check the engine's log and version; run `tokentape doctor`.",
    "EngineUnavailable": "Start the engine or wait for it, then retry.",
    "EngineAborted": "Retry.",
    "EngineTimeout": "Raise `engine.timeouts`, or reduce the engine's load.",
    "StoreError": "Check the gateway's log, then restart the gateway.",
    "StoreLocked": "Stop the other gateway, or use a different directory.",
    "StoreCorrupt": "`tokentape verify STORE` names session and turn; restore a backup.",
    "StoreFull": "Free up space on the disk.",
    "StoreUnavailable": "Start the database, then retry.",
    "TrainingStopped": "Raised by a stop rule, not sent. [Stop rules](../how-to/train-live.md#stop-rule-and-trackers)",
    "GatewayUnavailable": "Start the gateway, or correct the URL.",
}
"""What to do about each error. A class that is missing here fails the script."""

VERDICTS = {
    "exact": ("Every context continues the one before.", "Yes."),
    "forked": (
        "A turn could not continue its parent's ids and began a branch; the cause is below. The ids are those that the "
        "engine received and sampled. In the new context, replies that the session "
        "[recognizes](../how-to/connect-an-agent.md#edited-histories) have their sampled ids.",
        "Yes: a token that several branches share is trained once. Each branch is one more sample with its own "
        "context. If many turns fork, look at the cause first; a "
        "[stop rule](../how-to/train-live.md#stop-rule-and-trackers) can halt the run.",
    ),
    "closed": (
        "A turn before the last was ended by Tokentape, for example at `max_tokens`, and not by the model.",
        "Yes: the closing tokens are context and have no loss. The model never sampled an end there, so raise "
        "`max_tokens` if this is frequent.",
    ),
    "captured": (
        "The server rendered the prompts (`--capture`), and each continued the one before.",
        "Yes, as `exact`.",
    ),
    "captured with drift": (
        "As `captured`, and the server's prompt was another than the session's context.",
        "Yes, as a fork: the ids of each branch are those that the server sampled from, with a history that was "
        "tokenized again.",
    ),
}

RESERVATIONS = {
    "model unverified": (
        "A turn was sampled by a server that was not known to serve the folder's model.",
        "If you know that it is the model. Otherwise the ids may mean other text; `tokentape doctor` says what is not "
        "known. `--verdict 'exact,model unverified'` exports it.",
    ),
    "bridge unchecked": (
        "A bridge was not yet compared with the template's own rendering.",
        "Yes for most uses. `--wait-checks` waits for the checks; `--check-bridges all` checks every bridge.",
    ),
    "bridge differs": (
        "A bridge is not what the template writes. The sampled ids are still exact.",
        "It trains replies to a context that the template never writes. Leave it out unless it is rare.",
    ),
    "kept partial": (
        "The engine aborted a turn, and what was sampled until then is the reply.",
        "Yes; the reward is for a reply that was cut short.",
    ),
    "unread": (
        "The client of the last turn left before it had all of the reply. Excluded unless you pass `--unread`.",
        "No: no agent acted on it, so a reward says nothing about it.",
    ),
    "other logprobs": (
        "The recorded logprobs are of another distribution than the tokens were sampled from.",
        "If your trainer computes that distribution; exports refuse it otherwise "
        "([table](../how-to/train.md#what-the-recorded-logprobs-are-of)). Losses without recorded logprobs can use it.",
    ),
    "logprobs not known": (
        "It is not known which distribution the logprobs are of.",
        "Exports refuse them; supervised fine-tuning can use the ids.",
    ),
    "supports not known": (
        "Truncated sampling, and it is not recorded which ids were kept.",
        "Trainers refuse it. Record them from now on with `--supports 4096` ([how](../how-to/replay-truncation.md)), "
        "or sample without top-p, top-k and min-p.",
    ),
}

GRPO = ("exact", "forked", "closed", "captured", "captured with drift", "bridge unchecked", "kept partial")
"""The verdicts and reservations whose rows say Yes."""

HEAD = "<!-- Written by scripts/reference_tables.py. -->"


def http() -> Iterator[str]:
    """Yield the lines of the page of the HTTP API."""
    yield from _head("HTTP API")
    yield "A running gateway serves the whole description, with the fields of bodies, at `/openapi.json`. Paths that"
    yield "are marked with a star exist below `/sessions/{session_id}` too, where an agent's base URL points."
    yield 'Errors have the form `{"error": {type, message, code, param}}` ([codes](errors.md)). Unknown fields of a'
    yield "body are refused, and so are unknown and repeated query parameters of `/sessions` and `/snapshots`."
    yield ""
    # The routes only refer to what they serve.
    turns = MagicMock()
    turns.engine.info.max_context = 1
    routes = [one for one in create_app(turns, model_id="model").routes if isinstance(one, ApiRoute)]
    paths = {(one.method, one.path_format) for one in routes}
    rows = []
    for one in routes:
        below = "/sessions/{session_id}"
        if one.path_format.startswith(below) and (one.method, one.path_format.removeprefix(below)) in paths:
            continue
        star = " *" if (one.method, below + one.path_format) in paths else ""
        rows.append((f"`{one.method.upper()} {one.path_format}`{star}", one.summary, ", ".join(one.media)))
    yield from _table(
        ("request", "what it does", "reply"), sorted(rows, key=lambda row: row[0].split(" ")[1].strip("`*"))
    )


def _described(cls: type) -> dict[str, str]:
    """Return the docstrings of a class's fields."""
    (body,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: text.value.value
        for field, text in pairwise(body.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def setting_lines() -> Iterator[str]:
    """Yield the lines of the page of settings."""
    yield from _head("Settings")
    yield "The settings of `tokentape serve`, `doctor` and `config show`. A flag overrides the environment variable,"
    yield "and the variable overrides `tokentape.toml`. In this file, `engine.kind` is `kind` in the section"
    yield "`[engine]`."
    yield ""
    described = {f"limits.{name}": text for name, text in _described(Limits).items()}
    described |= {f"engine.timeouts.{name}": f"In seconds. {text}" for name, text in _described(Timeouts).items()}
    rows = []
    for one in settings().values():
        flag = "MODEL" if one.name == "model" else one.flag if one.option else ""
        said = one.help or (
            "API keys by name; see [keys](../how-to/run-in-production.md#keys)." if one.name in SECRETS else ""
        )
        if not one.option and one.name in described:
            said = f"{described[one.name]} {said}"
        rows.append((f"`{one.name}`", f"`{flag}`" if flag else "", f"`{env_name(one.name)}`", said))
    yield from _table(("setting", "flag", "variable", ""), rows)


def error_lines() -> Iterator[str]:
    """Yield the lines of the page of errors."""
    yield from _head("Errors")
    yield "`tokentape.errors`. *again*: the same request can succeed later, and official clients send it again"
    yield "(`x-should-retry`). The command line prints the message and exits with 2."
    yield ""
    found = vars(errors).values()
    classes = [one for one in found if inspect.isclass(one) and issubclass(one, errors.TokentapeError)]
    rows = [
        (
            f"`{one.__name__}`",
            str(one.status),
            f"`{one.code}`",
            "yes" if one.retry else "",
            " ".join((one.__doc__ or "").split("\n\n")[0].split()),
            ADVICE[one.__name__],
        )
        for one in classes
    ]
    yield from _table(("class", "status", "code", "again", "meaning", "what to do"), rows)


def metrics() -> Iterator[str]:
    """Yield the lines of the page of metrics."""
    yield from _head("Metrics")
    yield "At `/metrics`, for Prometheus; [which to watch](../how-to/run-in-production.md#metrics-and-traces). No label"
    yield "names a session or a caller, or has what a caller wrote."
    yield ""
    names = {name: one._labelnames for one in vars(Metrics()).values() if (name := getattr(one, "_name", None))}
    rows = []
    for family in Metrics().registry.collect():
        labels = ", ".join(f"`{label}`" for label in names[family.name])
        total = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append((f"`{total}`", family.type, labels, family.documentation))
    yield from _table(("metric", "kind", "labels", ""), sorted(rows))


def verdicts() -> Iterator[str]:
    """Yield the lines of the page of verdicts."""
    yield from _head("Verdicts")
    yield "The verdict of a branch is a word, for a fork with its cause, and then reservations: `exact`,"
    yield "`forked: sibling`, `exact, model unverified`. `tokentape export --verdict` and `KeepVerdicts` select by it."
    yield "`tokentape show STORE` lists the verdicts of all sessions, `tokentape show STORE SESSION` shows for each"
    yield "fork where it comes from, if that is known, and for `edited_history` the first message that differs."
    yield ""
    yield "A filter is a list. A branch passes if the list has its word and each of its reservations. So `exact`"
    yield "selects no branch with a reservation, `exact,model unverified` selects `exact` branches with and without"
    yield "this one, and `exact,forked:branched` selects two kinds of branches. `forked` selects every fork,"
    yield "`forked:sibling` those of one cause; labels print it as `forked: sibling`, with a space."
    yield ""
    yield "For GRPO, this list takes every row below that says *Yes*:"
    yield ""
    verdict.check_verdicts(GRPO)
    yield from ("```text", f"--verdict '{','.join(GRPO)}'", "```", "")
    yield from ("```python", f"GRPO = {list(GRPO)}".replace("'", '"'))
    yield from ("made = assemble(trajectories, select=[KeepVerdicts(GRPO)])", "```", "")
    yield "Adapters for live training don't filter by verdict: they give the trainer every branch, and a"
    yield "[stop rule](../how-to/train-live.md#stop-rule-and-trackers) can halt the run. Only TRL's take `select`, as"
    yield "`assemble` does."
    yield ""
    yield from _table(("word", "meaning", "train it?"), [(f"`{one}`", *VERDICTS[one]) for one in verdict.VERDICTS])
    yield ""
    yield from _table(("cause of a fork", "meaning"), [(f"`{name}`", text) for name, text in _causes()])
    yield ""
    yield "Harnesses that start subagents, ask for titles, summarize or edit their history fork most"
    yield "([which ones](../how-to/connect-an-agent.md#harnesses)). Those that only append seldom do."
    yield ""
    reservations = [(f"`{one}`", *RESERVATIONS[one]) for one in verdict.RESERVATIONS]
    yield from _table(("reservation", "meaning", "train it?"), reservations)


def _causes() -> Iterator[tuple[str, str]]:
    meanings = {
        "sibling": "The same messages were answered before: a repeat that did not mark itself as a retry, "
        "`n` > 1, or two calls at once.",
        "branched": "An earlier turn is continued in another way.",
        "edited_history": "The messages match no recorded turn: the agent changed or shortened its history.",
        "new_setup": "Tools or template settings changed.",
        "template_rewrites": "The template can't append what is asked for.",
        "template_history": "With `--history template`, the template drops part of earlier turns.",
        "other_stop": "With `--stop-mismatch fork`: the turn before ended with a stop token of another kind.",
        "drift": "In capture mode, the server's prompt was another than the session's context.",
    }
    return ((cause, meanings[cause]) for cause in verdict.FORKS)


def _head(title: str) -> Iterator[str]:
    yield from (f"# {title}", "", HEAD, "")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(head)
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "http": http,
    "settings": setting_lines,
    "errors": error_lines,
    "metrics": metrics,
    "verdicts": verdicts,
}


def page(name: str) -> str:
    """Return the text of a page."""
    return "\n".join(PAGES[name]()) + "\n"


def main() -> None:
    """Write all pages."""
    for name in PAGES:
        (FOLDER / f"{name}.md").write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
