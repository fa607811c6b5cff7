"""Play scenes and keep the counts: `python -m tests.harness.lineage SCENE SEED...`.

`counts.json` has what the last run of each scene and seed gave; `tests/docs/test_lineage.py` compares it with the page.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import tokentape.demo
from tests.harness.lineage.director import Counts, Cutting, Director, scored
from tokentape.chat._renderer import Renderer
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

COUNTS = Path(__file__).parent / "counts.json"
SCENES = {
    "claude": ("claude", "@anthropic-ai/claude-code"),
    "edits": ("edited.py", "langgraph"),
    "opencode": ("opencode", "opencode-ai"),
    "sdks": ("", ""),
    "teams": ("teams.py", "agno"),
}
"""The program that a scene needs, and its package; see `program_of`."""


def play(scene: str, seed: int, renderer: Renderer, scratch: Path) -> Counts:
    """Return the counts of a scene."""
    home, folder, director = scratch / "home", scratch / "folder", Director(renderer, seed)
    home.mkdir()
    folder.mkdir()
    (folder / "apples.txt").write_text("There are 31 apples.\n")
    with SqliteStore.open(scratch / "record") as store:
        cutting = Cutting(create_app(Turns(director, renderer, store), model_id="m"))
        with running(cutting) as gateway:
            import_module(f"tests.harness.lineage.{scene}").run(director, cutting, gateway, home, folder, seed)
            return scored(store, director)


def main() -> None:
    renderer = Renderer.load(Path(tokentape.demo.__file__).parent / "model")
    for seed in map(int, sys.argv[2:]):
        with tempfile.TemporaryDirectory() as scratch:
            counts = play(sys.argv[1], seed, renderer, Path(scratch))
        print(*counts.rows(), *counts.details, sep="\n")
        kept: dict[str, Any] = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
        kept[f"{sys.argv[1]} {seed}"] = counts.plain()
        COUNTS.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
