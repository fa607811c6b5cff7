"""Tokentape: train on exactly the tokens your model sampled.

Users may rely on these names, on those of the packages `chat`, `engines`, `store`, `gateway`, `training` and `audit`,
and on the modules `errors`, `types` and `testing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokentape._lazy import lazy_names
from tokentape._version import __version__

if TYPE_CHECKING:
    from tokentape._session.files import read_trajectories, write_trajectories
    from tokentape.audit._lock import check
    from tokentape.chat._renderer import Renderer
    from tokentape.client import AsyncClient, Client
    from tokentape.errors import TokentapeError
    from tokentape.store import open_record, verify
    from tokentape.training import Sample, assemble
    from tokentape.types import Provenance, Trajectory

__all__ = [
    "AsyncClient", "Client", "Provenance", "Renderer", "Sample", "TokentapeError", "Trajectory", "__version__",
    "assemble", "check", "open_record", "read_trajectories", "verify", "write_trajectories",
]  # fmt: skip

# Keep `import tokentape` fast: a name is imported when it is first used.
__getattr__ = lazy_names(__name__)
