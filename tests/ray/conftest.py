"""Ray on this machine alone: two CPUs, no dashboard, little memory, and nothing left afterwards."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

RAYS_OWN_WARNINGS = (r"ignore::DeprecationWarning:ray\..*",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("ray"):
            for warning in RAYS_OWN_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def cluster(_own_cache: None) -> Iterator[None]:
    """Run a Ray cluster of a node with child processes of this process."""
    ray = pytest.importorskip("ray", reason="needs Ray (make test-ray)")
    # It contains Unix sockets, so its name is short.
    directory = Path(tempfile.mkdtemp(prefix="ray-"))
    token = directory / "token"
    token.write_text(secrets.token_hex(16))
    options = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_TOKEN_PATH": str(token),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setenv(name, value)
        # Actors import the package from the same place as this process.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
        try:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=200 * 2**20,
                log_to_driver=False,
                _temp_dir=str(directory),
            )
            yield
        finally:
            ray.shutdown()
            shutil.rmtree(directory, ignore_errors=True)
