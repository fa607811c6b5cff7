"""The demo's model, prepared once for all tests of the mutator."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.audit.mutator.files import TINY, load
from tests.audit.mutator.judge import Base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    base = Base(load(TINY), tmp_path_factory.mktemp("models"))
    if settings.get_current_profile_name() == "same":
        # The changes of a mutant are covered by separate texts.
        base.view.texts = base.view.texts[::5]
    return base
