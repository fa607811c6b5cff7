"""The operations kit speaks of metrics, settings and paths that are there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from tokentape.config import settings
from tokentape.gateway._telemetry import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"

MADE_BY_PROMETHEUS = {"job", "instance", "le"}


def samples_of(registry: CollectorRegistry) -> dict[str, set[str]]:
    """The labels of each time series that a gateway shows, by its name."""
    found: dict[str, set[str]] = {}
    for metric in registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(metric.type, [""])
        family = registry._names_to_collectors[metric.name]
        for suffix in suffixes:
            found[metric.name + suffix] = set(family._labelnames) | MADE_BY_PROMETHEUS  # type: ignore[attr-defined]
    return found


def expressions() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana/tokentape.json").read_text())
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    alerts = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    rules = [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    assert len(panels) > 15
    assert len(rules) > 4
    return panels + rules


@pytest.mark.parametrize("expression", expressions())
def test_what_is_asked_for_is_measured(expression: str) -> None:
    known = samples_of(Metrics().registry)
    assert expression.count("(") == expression.count(")")
    for name, selector in re.findall(r"\b(tokentape_\w+)(?:\{([^}]*)\})?", expression):
        assert name in known
        assert set(re.findall(r"(\w+)\s*[=!]~?\s*\"", selector)) <= known[name]
    names = re.findall(r"\btokentape_\w+", expression)
    for by in re.findall(r"\bby \(([^)]*)\)", expression):
        assert all(label.strip() in known[name] for name in names for label in by.split(","))


def test_dashboard_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((DEPLOY / "grafana/tokentape.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_alerts_pass_prometheus_own_check() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool")
    rules = DEPLOY / "prometheus/alerts.yml"
    done = subprocess.run([promtool, "check", "rules", rules], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_unit_passes_systemds_own_check(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze")
    unit = (DEPLOY / "systemd/tokentape.service").read_text().replace("/opt/tokentape/bin/tokentape", "/bin/true")
    (tmp_path / "tokentape.service").write_text(unit)
    done = subprocess.run([analyze, "verify", tmp_path / "tokentape.service"], capture_output=True, text=True)
    assert "tokentape.service" not in done.stderr, done.stderr


def manifests() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes/tokentape.yaml").read_text())}


def test_manifest_holds_a_configuration_that_the_gateway_takes() -> None:
    table = tomllib.loads(manifests()["ConfigMap"]["data"]["tokentape.toml"])
    flat = {f"{key}.{name}" for key, value in table.items() if isinstance(value, dict) for name in value}
    flat |= {key for key, value in table.items() if not isinstance(value, dict)}
    assert flat <= set(settings())


def test_manifest_agrees_with_itself() -> None:
    found = manifests()
    table = tomllib.loads(found["ConfigMap"]["data"]["tokentape.toml"])
    pod = found["StatefulSet"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    (port,) = container["ports"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {one["name"] for one in pod["spec"]["volumes"]} | {
        one["metadata"]["name"] for one in found["StatefulSet"]["spec"]["volumeClaimTemplates"]
    }
    assert port["containerPort"] == found["Service"]["spec"]["ports"][0]["port"] == table["port"]
    assert {table["model"], table["data"], str(Path(table["keys_file"]).parent)} <= mounts
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert found["StatefulSet"]["spec"]["replicas"] == 1
    assert pod["spec"]["terminationGracePeriodSeconds"] > table["drain_seconds"]
    assert pod["metadata"]["labels"] == found["Service"]["spec"]["selector"]


def test_container_file_copies_what_the_build_needs() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    (copied,) = re.findall(r"^COPY (pyproject.*) \./$", text, re.MULTILINE)
    assert set(re.findall(r"-r (\S+)", text)) == {Path(name).name for name in copied.split() if name.endswith(".txt")}
    assert all((DEPLOY.parent / name).is_file() for name in copied.split())
    assert "torch" not in text.split("\n", 1)[1]
