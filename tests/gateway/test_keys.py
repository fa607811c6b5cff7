from __future__ import annotations

import pytest

from tokentape.errors import InvalidRequest, Unauthorized
from tokentape.gateway._keys import Caller, Keys

TEAM, OTHER, ADMIN = "team-secret-0123456789", "other-secret-0123456789", "admin-secret-0123456789"
KEYS = Keys({"team": TEAM, "other": OTHER}, {"root": ADMIN})


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("headers", [bearer(TEAM), {"authorization": f"bearer  {TEAM}"}, {"x-api-key": TEAM}])
def test_a_known_key_names_its_owner(headers: dict[str, str]) -> None:
    assert KEYS.caller(headers) == Caller("team")


def test_admin_sees_all_sessions_and_others_only_their_own() -> None:
    assert KEYS.caller(bearer(ADMIN)).sees is None
    assert KEYS.caller(bearer(TEAM)).sees == "team"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer(TEAM + "x"),
        bearer(TEAM[:-1]),
        {"authorization": f"Basic {TEAM}"},
        {"x-api-key": "\u00e9" * 20},
        bearer("tts_" + "0" * 32 + "_team_s1"),
        bearer(Keys().session_key("", "s1")),
        bearer(KEYS.session_key("nobody", "s1")),
    ],
)
def test_no_key_and_an_unknown_key_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized):
        KEYS.caller(headers)


@pytest.mark.parametrize("session_id", ["s1", "a_b_c", "a:b.c-d", "tts_x"])
def test_a_session_key_opens_its_session_and_no_other(session_id: str) -> None:
    key = KEYS.session_key("team", session_id)
    assert KEYS.caller(bearer(key)) == Caller("team", session_id=session_id)
    with pytest.raises(Unauthorized):
        KEYS.caller(bearer(key + "x"))
    with pytest.raises(Unauthorized):
        KEYS.caller(bearer(key.replace("_team_", "_other_")))


def test_session_key_of_an_admin_is_not_an_admin_key() -> None:
    assert KEYS.caller(bearer(KEYS.session_key("root", "s"))) == Caller("root", session_id="s")


def test_a_key_and_the_one_that_replaces_it_are_valid_together() -> None:
    old, both, new = (Keys({"team": text}) for text in (TEAM, f"{OTHER} {TEAM}", OTHER))
    assert both.caller(bearer(TEAM)) == both.caller(bearer(OTHER)) == Caller("team")
    assert both.session_key("team", "s") == new.session_key("team", "s")
    for key in (old.session_key("team", "s"), new.session_key("team", "s")):
        assert both.caller(bearer(key)) == Caller("team", session_id="s")
    for key in (TEAM, old.session_key("team", "s"), f"{OTHER} {TEAM}"):
        with pytest.raises(Unauthorized):
            new.caller(bearer(key))


def test_without_keys_everybody_may_do_everything() -> None:
    assert Keys().caller({}) == Keys().caller(bearer("anything")) == Caller("", admin=True)
    assert Keys().caller(bearer(Keys().session_key("", "s1"))) == Caller("", session_id="s1")


@pytest.mark.parametrize(
    ("keys", "admins"),
    [
        ({"a": "short"}, {}),
        ({"a b": TEAM}, {}),
        ({"": TEAM}, {}),
        ({"a": TEAM, "b": TEAM}, {}),
        ({"a": TEAM}, {"a": OTHER}),
        ({"a": TEAM}, {"b": TEAM}),
        ({"a": "with a space in between"}, {}),
        ({"a": f"{TEAM}  {OTHER}"}, {}),
        ({"a": f"{TEAM} {OTHER}", "b": OTHER}, {}),
    ],
)
def test_ambiguous_or_guessable_keys_are_refused(keys: dict[str, str], admins: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Keys(keys, admins)
    assert TEAM not in str(caught.value)
