"""Templates that mean harm: each is refused within seconds and a little memory, and the next one renders."""

from __future__ import annotations

import tracemalloc

import pytest

from tokentape.chat.template import ChatTemplate
from tokentape.errors import TemplateRefused

USER = [{"role": "user", "content": "hi"}]


def render(source: str) -> str:
    return _render(source, USER)


def _render(source: str, messages: list[dict[str, str]]) -> str:
    return ChatTemplate(source).render(
        messages, tools=[], add_generation_prompt=True, date="2026-01-01", variables={"bos_token": "<s>"}
    )


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% set l = range(9999) | list %}{% for a in l %}{% for b in l %}x{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
    ],
    ids=lambda source: source[:60],
)
def test_what_runs_for_ever_is_ended(source: str) -> None:
    with pytest.raises(TemplateRefused, match="steps"):
        render(source)
    assert render("{{ messages[0].content }}") == "hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 800000000 }}",
        "{{ [0] * 800000000 }}",
        "{{ 800000000 * 'a' }}",
        "{% set ns = namespace(s='aaaaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='aaaaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1, 2, 3]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ 9 ** 999999999 }}",
        "{{ 'a' | center(999999999) }}",
        "{{ 'a' | indent(999999999, true) }}",
        "{{ 'a'.ljust(999999999) }}",
        "{{ 'a'.zfill(width) if false else 'a'.zfill(999999999) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ range(999999999) | list }}",
        "{{ [1, 2] | slice(999999999) | list }}",
    ],
    ids=lambda source: source[:60],
)
def test_what_would_be_huge_is_refused(source: str) -> None:
    tracemalloc.start()
    with pytest.raises(TemplateRefused):
        render(source)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Of another order than what it asks for.
    assert most < 2**29
    assert render("{{ messages[0].content }}") == "hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ dict.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ _steps_left.__init__ }}",
        "{{ ''.format.__self__.__class__.__mro__[1] }}",
        "{% set x = '{0.__class__.__base__.__subclasses__}'.format('') %}{{ x }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_python_is_out_of_reach(source: str) -> None:
    try:
        text = render(source)
    except TemplateRefused:
        return
    assert "class" not in text
    assert "function" not in text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ 'ab' * 3 }}{{ '%s-%s' % ('a', 'b') }}{{ 7 % 4 }}{{ 2 ** 10 }}", "abababa-b31024"),
        ("{{ [1] + [2] }}{{ 'a' + 'b' }}{{ 1 + 2 }}", "[1, 2]ab3"),
        ("{% macro m(n) %}{{ n }}{% if n %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(3) }}", "3210"),
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}", "1hi!"),
        ("{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% macro w() %}<{{ caller() }}>{% endmacro %}{% call w() %}x{% endcall %}", "<x>"),
        ("{{ 'a'.ljust(3, '.') }}{{ 'x' | center(3) }}{{ '{:>3}'.format(1) }}", "a.. x   1"),
    ],
)  # fmt: skip
def test_what_templates_do_is_as_ever(source: str, text: str) -> None:
    assert render(source) == text


def test_a_long_conversation_is_no_bomb() -> None:
    messages = [{"role": "user", "content": "hi"}] * 20_000
    source = "{% for m in messages %}{% for k in m %}{% endfor %}{{ m.role }}{% endfor %}"
    assert len(_render(source, messages)) == 80_000
