from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tokentape.chat._certificate import FEATURES, REQUIRABLE, Certificate
from tokentape.chat._certificate_cache import load_or_certify
from tokentape.chat._renderer import Renderer


@pytest.fixture(scope="module")
def certificate(renderer: Renderer) -> Certificate:
    """Return the certificate of the packaged tiny model."""
    return load_or_certify(renderer, {})


def without_check(certificate: Certificate, name: str, holds: bool | None) -> Certificate:
    checks = [replace(c, holds=holds, detail="so") if c.name == name else c for c in certificate.parsing]
    return replace(certificate, parsing=tuple(checks))


def test_certificate_round_trips_through_json(certificate: Certificate) -> None:
    assert Certificate.from_json(certificate.to_json()) == certificate


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"format": 99}', '{"format": 3}'])
def test_invalid_certificate_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a certificate"):
        Certificate.from_json(text)


def test_json_with_extra_or_missing_fields_is_a_value_error(certificate: Certificate) -> None:
    fields = json.loads(certificate.to_json())
    with pytest.raises(ValueError, match="not a certificate"):
        Certificate.from_json(json.dumps({**fields, "more": 1}))
    del fields["parsing"]
    with pytest.raises(ValueError, match="not a certificate"):
        Certificate.from_json(json.dumps(fields))


def test_nothing_required_is_no_shortfall(certificate: Certificate) -> None:
    assert list(certificate.shortfalls([])) == []


def test_certified_features_are_no_shortfall(certificate: Certificate) -> None:
    assert list(certificate.shortfalls(["user", "tool", "tools", "reasoning", "calls", "injection"])) == []


def test_a_refused_continuation_is_a_shortfall_and_a_fork_is_not(certificate: Certificate) -> None:
    def changed(strategy: str) -> list[str]:
        continuations = [replace(c, strategy=strategy, reason="so") for c in certificate.continuations]  # type: ignore[arg-type]
        return list(replace(certificate, continuations=tuple(continuations)).shortfalls(["user", "tool+user"]))

    assert changed("refused") == ["user: so", "tool+user: so"]
    assert changed("fork") == []


@pytest.mark.parametrize("feature", [name for name in FEATURES if FEATURES[name]])
@pytest.mark.parametrize("holds", [False, None])
def test_feature_needs_all_its_parse_checks(certificate: Certificate, feature: str, holds: bool | None) -> None:
    for check in FEATURES[feature]:
        shortfalls = list(without_check(certificate, check, holds).shortfalls([feature]))
        assert shortfalls == [f"{feature}: {check}: so"]


@pytest.mark.parametrize("name", ["tool", "tools", "tool+user"])
@pytest.mark.parametrize("check", FEATURES["calls"])
def test_tool_results_need_calls_that_are_parsed(certificate: Certificate, name: str, check: str) -> None:
    (line,) = without_check(certificate, check, None).shortfalls([name, "user"])
    assert line.startswith(f"{name}: the continuation is exact, but ")
    assert ("agents get them as content" in line) == (check == "call")
    assert line.endswith(f"{check}: so")


def test_reasoning_missing_from_the_template_is_a_shortfall(certificate: Certificate) -> None:
    assert len(list(replace(certificate, reasoning=None).shortfalls(["reasoning"]))) == 1


def test_forged_control_tokens_are_a_shortfall(certificate: Certificate) -> None:
    assert len(list(replace(certificate, injection_safe=False).shortfalls(["injection", "user"]))) == 1


def test_every_name_can_be_required(certificate: Certificate) -> None:
    empty = replace(certificate, continuations=(), injection_safe=False, reasoning=None)
    for check in empty.parsing:
        empty = without_check(empty, check.name, None)
    assert len(list(empty.shortfalls(REQUIRABLE))) == len(REQUIRABLE)
