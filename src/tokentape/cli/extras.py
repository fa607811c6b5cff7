"""Optional packages that some subcommands need."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tokentape.engines._base import Dtype
from tokentape.errors import TokentapeError
from tokentape.training._logprob_check import Forward, forward_pass


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
