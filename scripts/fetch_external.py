"""Fill the folder that `make test-external` reads from clones of public repositories.

    python scripts/fetch_external.py                  list the required repositories, commits and files
    python scripts/fetch_external.py CLONES [FOLDER]  copy the files from CLONES/NAME, one clone per repository
    python scripts/fetch_external.py --verify [FOLDER]

FOLDER is $TOKENTAPE_EXTERNAL if not given, else ../shared/external. The files belong to other projects and stay outside
this repository. The commit fixes the content of each file; if the list has its SHA-256, the script checks that too.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILES: list[dict[str, Any]] = json.loads((ROOT / "tests" / "external" / "manifest.json").read_bytes())["files"]


def show() -> None:
    """Print the required files, by repository."""
    needed: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in FILES:
        needed[entry["repo"], entry["commit"]].append(entry["path"])
    for (repo, commit), paths in needed.items():
        print(f"github.com/{repo} at {commit}:", *(f"    {path}" for path in paths), sep="\n")
    print(f"{len(FILES)} files. Clone the repositories side by side, then: python scripts/fetch_external.py CLONES")


def copy(clones: Path, folder: Path) -> None:
    """Copy each file at its commit. Exit with a message if a file is missing or differs."""
    for entry in FILES:
        clone = clones / entry["repo"].split("/")[1]
        found = subprocess.run(
            ["git", "-C", str(clone), "show", f"{entry['commit']}:{entry['path']}"], capture_output=True, check=False
        )
        if found.returncode:
            sys.exit(f"{entry['repo']}@{entry['commit']}:{entry['path']}: {found.stderr.decode().strip()}")
        path = folder / entry["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found.stdout)
    verify(folder)


def verify(folder: Path) -> None:
    """Exit with a message unless every file exists and matches the list."""
    wrong = []
    for entry in FILES:
        path = folder / entry["file"]
        if not path.is_file():
            wrong.append(f"{entry['file']} is missing")
        elif entry["sha256"] and hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
            wrong.append(f"{entry['file']} is another file: its SHA-256 is not the listed one")
    if wrong:
        sys.exit("\n".join(wrong))
    listed = sum(bool(entry["sha256"]) for entry in FILES)
    print(f"{len(FILES)} files are there; {listed} have the listed SHA-256, the others have none listed")


def main() -> None:
    """List, copy or verify."""
    folder = Path(os.environ.get("TOKENTAPE_EXTERNAL", ROOT.parent / "shared" / "external"))
    match sys.argv[1:]:
        case []:
            show()
        case ["--verify", *given]:
            verify(Path(given[0]) if given else folder)
        case [clones, *given]:
            copy(Path(clones), Path(given[0]) if given else folder)


if __name__ == "__main__":
    main()
