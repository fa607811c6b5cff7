from __future__ import annotations

from tokentape.chat._grammar import NAMES, SYSTEM, continuation_name, conversations


def roles(*names: str) -> list[dict[str, str]]:
    return [{"role": name} for name in names]


def test_continuations_are_named_by_their_roles() -> None:
    assert continuation_name(roles("tool", "tool", "tool", "user", "assistant", "tool")) == "tools+user+assistant+tool"


def test_continuation_names_include_missing_tools_and_system_message() -> None:
    names = [continuation_name(roles("user"), tools=t, system=s) for t in (True, False) for s in (True, False)]
    assert names == ["user", "user", "user/no-tools", "user/no-tools/no-system"]


def test_every_name_has_conversations_of_its_kind() -> None:
    for name in NAMES:
        for history, _, new in conversations(name):
            assert continuation_name(new) == name.partition("/")[0]
            assert not ("no-system" in name and SYSTEM in history)
