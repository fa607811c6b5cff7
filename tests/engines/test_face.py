"""Exports of the package, and that importing it loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import tokentape.engines


def test_every_public_name_is_exported() -> None:
    assert {name: getattr(tokentape.engines, name).__name__ for name in tokentape.engines.__all__} == {
        name: name for name in tokentape.engines.__all__
    }


def test_importing_engines_loads_no_http_client_and_no_model() -> None:
    code = "import sys, tokentape.engines; print({'aiohttp', 'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
