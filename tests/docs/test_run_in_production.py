"""What docs/how-to/run-in-production.md shows is what there is."""

from __future__ import annotations

import re
from pathlib import Path

from tokentape.config import resolve
from tokentape.gateway._telemetry import Metrics

PAGE = (Path(__file__).parents[2] / "docs/how-to/run-in-production.md").read_text(encoding="utf-8")


def test_the_configuration_shown_can_be_read(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "shown.toml"
    file.write_text(shown, encoding="utf-8")
    config = resolve({}, {}, file).config
    assert (config.engine.kind, len(config.engine.urls), config.limits.calls_per_key) == ("vllm", 2, 256)


def test_the_metrics_to_watch_are_there() -> None:
    families = {
        f"{family.name}_total" if family.type == "counter" else family.name for family in Metrics().registry.collect()
    }
    watched = set(re.findall(r"`(tokentape_\w+)", PAGE))
    assert watched
    assert watched <= families
