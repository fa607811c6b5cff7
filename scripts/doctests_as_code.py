"""Show the examples in docstrings as code. In Markdown, `>>>` begins three nested quotes.

mkdocs.yml names this file as an extension of Griffe, which reads the docstrings for the reference pages.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1.*\S.*)*", re.MULTILINE)
_FLAGS = re.compile(r" *# doctest:.*")


def fenced(docstring: str) -> str:
    """Return a docstring with fences around its examples, up to the next empty line, and without doctest's flags.

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
