"""One change of a model's files: data that can be printed, read again and applied without a random number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from tests.audit.mutator.files import Model

Path: TypeAlias = tuple[str | int, ...]
Op: TypeAlias = Literal["set", "insert", "remove", "swap", "rename", "splice"]


@dataclass(frozen=True)
class Change:
    """A change at one path of one file.

    `set` and `insert` put `value` at the path, `remove` takes away what is there. `swap` exchanges two children of the
    path, named by `value`. `rename` gives the key at the end of the path the name `value`. `splice` replaces
    `value = [at, old, new]` within the text at the path. An empty path is the file itself.
    """

    file: str
    op: Op
    path: Path = ()
    value: Any = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Change:
        return cls(found["file"], found["op"], tuple(found["path"]), found["value"])

    def __str__(self) -> str:
        where = "/".join(map(str, self.path))
        return f"{self.file} {self.op} /{where} {_short(self.value)}"


def apply(model: Model, changes: Sequence[Change]) -> Model:
    """Return the model with all changes applied. Unchanged parts are shared with the original."""
    docs = dict(model.docs)
    for change in changes:
        if not change.path and change.op == "remove":
            del docs[change.file]
        elif not change.path and change.op in ("set", "insert"):
            docs[change.file] = change.value
        else:
            docs[change.file] = _changed(docs[change.file], change.path, change)
    return Model(model.name, docs, model.styles)


def value_at(doc: Any, path: Path) -> Any:
    """Return the value at a path."""
    for key in path:
        doc = doc[key]
    return doc


def _changed(doc: Any, path: Path, change: Change) -> Any:
    if len(path) > 1 or (path and change.op in ("swap", "splice")):
        copy = doc.copy()
        copy[path[0]] = _changed(doc[path[0]], path[1:], change)
        return copy
    match change.op:
        case "set":
            copy = doc.copy()
            copy[path[0]] = change.value
            return copy
        case "insert":
            copy = doc.copy()
            if isinstance(doc, list):
                copy.insert(path[0], change.value)
            else:
                copy[path[0]] = change.value
            return copy
        case "remove":
            copy = doc.copy()
            del copy[path[0]]
            return copy
        case "rename":
            return {change.value if key == path[0] else key: value for key, value in doc.items()}
        case "swap":
            first, second = change.value
            copy = doc.copy()
            copy[first], copy[second] = doc[second], doc[first]
            return copy
        case "splice":
            at, old, new = change.value
            assert doc[at : at + len(old)] == old, (at, old)
            return doc[:at] + new + doc[at + len(old) :]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:60] + "..." + text[-37:]
