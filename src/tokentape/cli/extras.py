"""Models in this process: their options, and the optional packages that they need."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, TypeAlias

from tokentape.cli.arguments import option
from tokentape.engines._base import Dtype
from tokentape.errors import TokentapeError
from tokentape.training._logprob_check import Forward, forward_pass

Device: TypeAlias = Annotated[
    str | None,
    option(
        "torch device of a model in this process, such as cpu or cuda:1. Default: the first CUDA GPU if there is one, "
        "else the CPU.",
        "DEVICE",
    ),
]
ModelDtype: TypeAlias = Annotated[
    Dtype | None, option("Type of weights and computation of a model in this process. Default: float32.")
]


def require(*modules: str, extra: str) -> None:
    """Raise `TokentapeError` with the install command if some of `modules` are missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        install = f"pip install 'tokentape[{extra}]'"
        if "torch" in missing:
            # The Linux build on PyPI downloads gigabytes of CUDA libraries.
            install += " (without a GPU first: pip install torch --index-url https://download.pytorch.org/whl/cpu)"
        raise TokentapeError(f"{', '.join(missing)} not installed; run: {install}")


def open_forward(
    model: Path, dtype: Dtype = "float32", adapter: Path | None = None, device: str | None = None
) -> Forward:
    """Load the weights of a model folder, and of a LoRA adapter, for forward passes."""
    require("torch", "transformers", extra="hf")
    return forward_pass(model, dtype=dtype, device=device or "auto", adapter=adapter)
