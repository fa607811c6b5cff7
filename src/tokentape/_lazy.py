"""Import the public names of a package on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def lazy_names(package: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` that imports names as `if TYPE_CHECKING:` in its source does."""

    def find(name: str) -> Any:
        module = _homes(package).get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    return find


@cache
def _homes(package: str) -> dict[str, str]:
    """Return the module of each name that the package imports."""
    import ast
    import pkgutil

    tree = ast.parse(pkgutil.get_data(package, "__init__.py") or b"")
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
