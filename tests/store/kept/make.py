"""Make the record that later versions must open: `python -m tests.store.kept.make FOLDER`.

`golden/record-d0a8210.db.gz` and `golden/record-d0a8210.json.gz` were made by this script with the code of commit
d0a8210, the version that the record was written by:

    git worktree add SOMEWHERE d0a8210
    PYTHONPATH=SOMEWHERE/src python -m tests.store.kept.make FOLDER

Do not make them again: a version that changes the schema migrates this file, and reads the same arrays from it.
A run writes the same ids, logprobs, rewards, columns and forks each time; times, random names and the digests that
cover them differ. The database is compacted and compressed; the JSON file has everything that d0a8210 read from it.
Every session is made through the HTTP interface of a gateway, some by several gateways in turn.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokentape
from tests.media.conftest import image_url
from tests.media.tiny_vision import picture, write_model
from tests.store.kept import sessions
from tests.store.kept.contents import contents
from tests.store.kept.plain import plain
from tests.store.kept.scripts import OddEngine, RenderingEngine
from tests.store.kept.sessions import END, THOUGHT, TOOLS
from tests.store.kept.talking import ADMIN, KEYS, Begin, Talk
from tokentape.chat._overrides import Completion, Overrides, parse_whole
from tokentape.chat._renderer import Renderer
from tokentape.chat._reply import Reply
from tokentape.demo import MODEL
from tokentape.engines._image_processor import QwenImageProcessor
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore, verify

COMMIT = "d0a8210"


@contextmanager
def gateway(directory: Path, renderer: Renderer, engine: OddEngine, **options: Any) -> Iterator[str]:
    """Serve the record in `directory`."""
    turns = Turns(engine, renderer, SqliteStore.open(directory), **options)
    with running(create_app(turns, model_id="tiny", keys=KEYS)) as url:
        yield url
    assert not engine.script, f"{len(engine.script)} replies were not asked for"


def first_gateway(directory: Path, renderer: Renderer) -> list[Any]:
    """Make most sessions, with payloads; return the messages of the session that another gateway continues."""
    engine = OddEngine(renderer, [])
    with gateway(directory, renderer, engine, payloads=True) as url:
        begin = Begin(url, engine)
        for make in sessions.ALL:
            make(begin)
        resumed = begin("resumed", [THOUGHT + "by the first gateway" + END], ADMIN)
        resumed.create(by="root")
        resumed.say("who are you?", tools=TOOLS)
    return resumed.messages


def later_gateways(directory: Path, renderer: Renderer, resumed: Sequence[Any]) -> None:
    """Run gateways of other kinds on the same record, in sequence."""
    with gateway(directory, renderer, OddEngine(renderer, ["by the second" + END], version="9")) as url:
        Talk(url, "resumed", ADMIN, resumed).say("and you?", tools=TOOLS)

    engine = OddEngine(renderer, [THOUGHT + "one" + END, THOUGHT + "two" + END, "three" + END])
    with gateway(directory, renderer, engine, history="template") as url:
        talk = Talk(url, "template-history")
        for question in "abc":
            talk.say(question)

    engine = OddEngine(renderer, ["another stop<|endoftext|>", "goes on elsewhere" + END])
    with gateway(directory, renderer, engine, stop_mismatch="fork") as url:
        talk = Talk(url, "stop-forked")
        for question in "ab":
            talk.say(question)

    server = RenderingEngine(renderer, ["one" + END, "two" + END, "three" + END, "four" + END], drifts_at=3)
    with gateway(directory, renderer, server, capture=server) as url:
        for name, questions in (("captured", "ab"), ("captured-with-drift", "ab")):
            talk = Talk(url, name)
            for question in questions:
                talk.say(question)

    def shouted(completion: Completion) -> Reply:
        return Reply(completion.text.upper(), "", (), reasoning_open=False)

    loud = Renderer(renderer.tokenizer, renderer.template, Overrides("loud", parse_whole(renderer, shouted)))
    with gateway(directory, loud, OddEngine(loud, ["quiet" + END, "more" + END])) as url:
        talk = Talk(url, "overridden")
        for question in "ab":
            talk.say(question)


def images(directory: Path) -> None:
    """Record a conversation with an image that later messages repeat and that is kept once."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), MODEL)
        renderer = Renderer.load(folder, images=QwenImageProcessor.open(Path(folder)))
        engine = OddEngine(renderer, ["a small picture" + END, "another" + END], media=True)
        with gateway(directory, renderer, engine) as url:
            talk = Talk(url, "images")
            first, second = picture(1, 30, 60), picture(2, 60, 30, "JPEG")
            talk.say([{"type": "text", "text": "what is"}, image_url(first), {"type": "text", "text": "this?"}])
            talk.say([image_url(second), image_url(first)])


def main(folder: Path) -> None:
    """Make the two files in `folder`."""
    source = Path(tokentape.__file__).parents[2]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=source, capture_output=True, text=True, check=True).stdout
    if not commit.startswith(COMMIT):
        raise SystemExit(f"this makes the record of {COMMIT}; the tokentape that is imported is of {commit.strip()}")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "data"
        renderer = Renderer.load(MODEL)
        resumed = first_gateway(directory, renderer)
        later_gateways(directory, renderer, resumed)
        images(directory)
        compact(directory / "tokentape.db")
        report = verify(directory)
        if not report.ok:
            raise SystemExit("\n".join(map(str, report.findings)))
        expected = {"written by": COMMIT, "verified": plain(report), **plain(contents(directory))}
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / f"record-{COMMIT}.json.gz", json.dumps(expected, ensure_ascii=False).encode())
        write(folder / f"record-{COMMIT}.db.gz", (directory / "tokentape.db").read_bytes())


def compact(database: Path) -> None:
    """Compact the database to a single file without free pages."""
    with sqlite3.connect(database, isolation_level=None) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def write(path: Path, data: bytes) -> None:
    path.write_bytes(gzip.compress(data, 9, mtime=0))
    print(f"{path.name}: {len(data)} bytes, {path.stat().st_size} compressed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
