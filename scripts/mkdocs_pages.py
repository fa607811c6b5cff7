"""Change what MkDocs would show wrong: examples in docstrings, and pipes in code in tables.

mkdocs.yml names this file twice: as hooks of MkDocs, and as an extension of Griffe, which reads the docstrings.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1.*\S.*)*", re.MULTILINE)
_FLAGS = re.compile(r" *# doctest:.*")
_ROW = re.compile(r"^\|.*", re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    r"""Return a page without backslashes before pipes in code in tables. GitHub needs them, and MkDocs shows them.

    >>> on_page_markdown(r"| `--format <text\|json>` | a \| b |")
    '| `--format <text|json>` | a \\| b |'
    """
    return _ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), markdown)


def fenced(docstring: str) -> str:
    """Return a docstring with fences around its examples, up to the next empty line, and without doctest's flags.

    Without fences, Markdown takes `>>>` for the beginning of three nested quotes.

    >>> fenced("Return one.\\n\\n>>> one()  # doctest: +SKIP\\n1\\n").splitlines()
    ['Return one.', '', '```pycon', '>>> one()', '1', '```']
    """
    return _EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{_FLAGS.sub('', found[0])}\n{found[1]}```", docstring)


class DoctestsAsCode(griffe.Extension):
    """Applies `fenced` to all docstrings."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object after all have been read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
