"""Names and import cost of `import tokentape`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tokentape
from tests.imports import loaded


def test_public_names() -> None:
    assert tokentape.__all__ == sorted(tokentape.__all__)
    for name in tokentape.__all__:
        assert getattr(tokentape, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        tokentape.nothing  # noqa: B018


def test_importing_loads_neither_torch_nor_transformers_nor_pyarrow() -> None:
    assert not {"torch", "transformers", "pyarrow"} & loaded()


def test_public_chat_module_is_complete_and_light() -> None:
    from tokentape import chat

    assert chat.__all__ == sorted(chat.__all__)
    assert all(callable(getattr(chat, name)) for name in chat.__all__)
    check = "import sys, tokentape.chat; print('tokenizers' in sys.modules, 'jinja2' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert run.stdout == "False False\n"
