"""`scripts/mkdocs_pages.py`: examples in docstrings are shown as code, and code in tables without backslashes."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

pytest.importorskip("griffe", reason="needs the dependency group `dev`")
markdown = pytest.importorskip("markdown", reason="needs the dependency group `dev`").markdown

REPOSITORY = Path(__file__).parents[2]
script = runpy.run_path(str(REPOSITORY / "scripts" / "mkdocs_pages.py"))
fenced = script["fenced"]


def docstrings() -> list[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (REPOSITORY / "src").rglob("*.py")]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    found = [ast.get_docstring(node) for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    return [docstring for docstring in found if docstring is not None and ">>> " in docstring]


def html(docstring: str) -> str:
    text: str = markdown(docstring, extensions=["fenced_code"])
    return text


def test_every_example_is_shown_as_code() -> None:
    examples = docstrings()
    assert len(examples) > 50
    assert all("<blockquote>" in html(docstring) for docstring in examples if "\n>>> " in docstring)
    assert [docstring for docstring in examples if "<blockquote>" in html(fenced(docstring))] == []


def test_an_example_ends_at_an_empty_line() -> None:
    assert html(fenced("One.\n\n>>> one()  # doctest: +SKIP\n1\n\nTwo.")) == (
        '<p>One.</p>\n<pre><code class="language-pycon">&gt;&gt;&gt; one()\n1\n</code></pre>\n<p>Two.</p>'
    )


def test_code_in_a_table_is_shown_without_the_backslashes_before_its_pipes() -> None:
    page = (REPOSITORY / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    shown = markdown(script["on_page_markdown"](page), extensions=["tables"])
    assert "<code>--format &lt;text|junit|sarif|github&gt;</code>" in shown
    assert "\\|" not in shown
