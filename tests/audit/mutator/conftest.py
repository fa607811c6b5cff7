"""The demo's model, prepared once for all tests of the mutator."""

from __future__ import annotations

import pytest

from tests.audit.mutator.files import TINY, load
from tests.audit.mutator.judge import Base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(load(TINY), tmp_path_factory.mktemp("models"))
