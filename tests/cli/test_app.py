from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

import tokentape
from tests.cli.conftest import Run
from tests.processes import Command
from tokentape.cli import app, main
from tokentape.errors import StoreError


def command_group() -> Any:
    return typer.main.get_command(app)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from tokentape.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy', 'pyarrow', 'sqlalchemy', 'starlette', 'rich'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("serve", "certify", "demo", "show", "export", "verify", "config", "doctor"):
        assert command in done.stdout


@pytest.mark.parametrize("group", [[], ["config"], ["snapshot"]])
def test_list_of_commands_truncates_no_sentence(run: Run, group: list[str]) -> None:
    done = run(*group, "-h")
    assert done.exit_code == 0
    assert "..." not in done.stdout.partition("Options:")[2]


def test_intended_command_is_suggested(run: Run) -> None:
    assert "Did you mean 'export'?" in run("exprot").stderr


@pytest.mark.parametrize("group", ["config", "snapshot"])
def test_command_group_offers_no_completion_options(run: Run, group: str) -> None:
    assert "completion" not in run(group, "--help").stdout


def test_completing_a_command_imports_no_command() -> None:
    code = (
        "import os, sys\n"
        "os.environ.update(_TOKENTAPE_COMPLETE='complete_bash', COMP_WORDS='tokentape ex', COMP_CWORD='1')\n"
        "from tokentape.cli import app\n"
        "try: app([], prog_name='tokentape')\n"
        "except SystemExit: pass\n"
        "print('tokentape.cli.export' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["export", "False"]


def test_version_is_printed(run: Run) -> None:
    done = run("--version")
    assert (done.exit_code, done.stdout) == (0, f"tokentape {tokentape.__version__}\n")


@pytest.mark.parametrize("arguments", [["nonsense"], ["verify"], ["verify", "no/such/directory"], ["show", "--leaf"]])
def test_invalid_command_line_is_exit_code_2(run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")


def test_failure_is_a_single_line_on_stderr(run: Run, tmp_path: Path) -> None:
    done = run("verify", tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {tmp_path}/tokentape.db does not exist: {tmp_path} is not a data directory; name the folder that was "
        "passed to `tokentape serve --data`\n"
    )


def test_debug_shows_the_traceback(run: Run, tmp_path: Path) -> None:
    assert isinstance(run("--debug", "verify", tmp_path).exception, StoreError)


@pytest.mark.parametrize("options", [["--debug"], []], ids=["debug", "unexpected"])
def test_traceback_is_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise AssertionError("a fault")

    monkeypatch.setattr(sys, "argv", ["tokentape", *options, "verify", str(tmp_path)])
    if not options:
        monkeypatch.setattr("tokentape.cli.verify.check", fails)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "Traceback" in capsys.readouterr().err


def test_closed_pipe_is_exit_code_2() -> None:
    command = [sys.executable, "-m", "tokentape", "config", "show"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait() == 2


def test_the_help_has_every_command_once_and_in_a_group(run: Run) -> None:
    commands = command_group().list_commands(None)
    listed = re.findall(r"^  ([a-z-]+) {2,}", run("--help").stdout.partition("Record and export:")[2], re.MULTILINE)
    assert sorted(listed) == sorted(commands)


def test_shell_can_complete_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for typed, expected in (("tokentape ser", "serve"), ("tokentape serve --engine-u", "--engine-url")):
        completing = {"_TOKENTAPE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        for name, value in completing.items():
            monkeypatch.setenv(name, value)
        with Command([]) as process:
            assert expected in process.stdout.read().split(), process.stderr.read()


def test_every_report_has_json() -> None:
    reports = (
        "show export verify score archive doctor certify audit lock check check-logprobs drift compare probe premium"
    )
    options = {name: command_group().get_command(None, name).params for name in reports.split()}
    without = [name for name, params in options.items() if not any("--json" in param.opts for param in params)]
    assert without == []


def test_exports_load_no_http_client() -> None:
    code = "import sys, tokentape.cli.export; print({'aiohttp', 'httpx2', 'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
