"""The description of the package on an index: the README without what only works in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def description(readme: str) -> str:
    """Return the README with the text of relative links but not the links, and without pictures and comments."""
    text = re.sub(r"<!--.*?-->\n?", "", readme, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


class ReadmeHook(MetadataHookInterface):
    """Sets `readme`. Hatchling finds the class by its base."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description: an index has no files for relative links to lead to."""
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": description(readme)}
