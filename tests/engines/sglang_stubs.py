"""Stand-ins for the CUDA packages that SGLang imports at its top, so that it starts on a CPU.

For the environment that docs/engines.md describes, and for nothing else: copy it into site-packages, with a file
`sglang_stubs.pth` beside it that contains `import sglang_stubs`. Every attribute of a stub is another stub.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

PACKAGES = {"triton", "torchvision", "flashinfer"}


class Anything:
    """An object that has every attribute, and that as a decorator changes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else Anything()

    def __getattr__(self, name: str) -> Any:
        if name == "active":  # triton.runtime.driver.active: there is no such device
            raise RuntimeError(name)
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, item: Any) -> Any:
        return Anything()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


class AnyClass(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class AnyModule(types.ModuleType):
    """A module that has every name: a class where it begins with a capital."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyClass(name, (Anything,), {}) if name[0].isupper() else Anything()


class Finder:
    """Finds every module of `PACKAGES` that is not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = AnyModule(spec.name)
        module.__path__ = []
        module.__dict__["__version__"] = "3.4.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Unpinning:
    """Lets SGLang's adapters allocate on a CPU: they ask for pinned memory, which only an accelerator has."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> None:
        if name != "sglang.srt.lora":
            return
        import torch

        for made in (torch.tensor, torch.empty, torch.zeros):
            setattr(torch, made.__name__, lambda *args, made=made, pin_memory=False, **more: made(*args, **more))
        torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign,assignment]


if __name__ != "__main__":
    sys.meta_path.insert(0, Unpinning())  # type: ignore[arg-type]
    sys.meta_path.append(Finder())  # type: ignore[arg-type]
