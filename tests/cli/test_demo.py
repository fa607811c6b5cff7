from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tokentape.cli.extras import require
from tokentape.errors import TokentapeError


@pytest.mark.slow
def test_json_has_the_run_and_its_findings(run: Run, tmp_path: Path) -> None:
    done = run("demo", "--out", tmp_path / "demo", "--sessions", 1, "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0
    assert (report["exact"], report["findings"], report["turns_differing_from_engine"]) == (True, 0, 0)
    assert [group["sessions"] for group in report["groups"]] == [1]
    assert Path(report["trajectories_file"]).is_file()


def test_a_directory_in_use_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("demo", "--out", tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith(f"error: {tmp_path} is not empty: choose a new directory\n")


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(TokentapeError, match=r"no_such_module not installed; run: pip install 'tokentape\[demo\]'"):
        require("json", "no_such_module", extra="demo")


def test_a_missing_torch_names_the_build_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentape.cli.extras.find_spec", lambda name: None)
    with pytest.raises(TokentapeError, match="without a GPU first: pip install torch --index-url"):
        require("torch", extra="hf")


def test_without_torch_a_recorded_run_is_shown(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'transformers', 'openai')))\n"
        "import tokentape.cli.extras as extras\n"
        "extras.find_spec = lambda name: None\n"
        "from tokentape.cli import app\n"
        "app(['demo', '--out', sys.argv[1]])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install 'tokentape[demo]'" in done.stderr
    assert "0 of" in done.stdout
    assert "verify: 0 findings" in done.stdout
