"""Refusals before the start, and the source of a request's affinity. Without a cluster."""

from __future__ import annotations

import pytest

from tests.imports import loaded
from tokentape.config import ServeConfig
from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.gateway._keys import Keys, session_in_key
from tokentape.ray import _data as data
from tokentape.ray import app, gateway_app


def test_importing_it_does_not_load_ray() -> None:
    assert "tokentape.ray" in loaded()
    assert "ray" not in loaded()


def test_a_record_that_replicas_cannot_share_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="postgresql://"):
        gateway_app(ServeConfig())


def test_workers_are_refused() -> None:
    config = ServeConfig(store="postgresql://h/d", workers=1)
    object.__setattr__(config, "workers", 2)
    with pytest.raises(InvalidRequest, match="num_replicas"):
        gateway_app(config)


def test_missing_ray_error_contains_install_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    with pytest.raises(TokentapeError, match=r"pip install 'tokentape\[ray\]'"):
        gateway_app(ServeConfig(store="postgresql://h/d"))


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="unknown settings: stoer"):
        app({"stoer": "postgresql://h/d"})


def test_invalid_setting_value_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="TOKENTAPE_ENGINE_KIND"):
        app({"store": "postgresql://h/d", "engine.kind": "no such"})


def test_session_id_is_read_from_a_derived_key() -> None:
    key = Keys({"team-1": "0123456789abcdef"}).session_key("team-1", "a_b:c.d-e")
    assert session_in_key(key) == "a_b:c.d-e"
    assert session_in_key("0123456789abcdef") is None


@pytest.mark.ray
@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/sessions/s1/v1/chat/completions", {}, "s1"),
        ("/prefix/sessions/a%3Ab", {}, "a:b"),
        ("/v1/chat/completions", {"X-Session-Id": "s1"}, "s1"),
        ("/v1/messages", {"x-api-key": Keys().session_key("", "s1")}, "s1"),
        ("/v1/chat/completions", {"Authorization": f"Bearer {Keys().session_key('', 's1')}"}, "s1"),
        ("/v1/chat/completions", {"Idempotency-Key": "k"}, "k"),
        ("/v1/chat/completions", {"Authorization": "Bearer key"}, None),
        ("/sessions", {}, None),
        ("/sessions/no%20id/v1/models", {}, None),
    ],
)
def test_affinity_of_calls(path: str, headers: dict[str, str], expected: str | None) -> None:
    pytest.importorskip("ray")
    from tokentape.ray._affinity import affinity_key

    assert affinity_key(path, [(name.lower().encode(), value.encode()) for name, value in headers.items()]) == expected
