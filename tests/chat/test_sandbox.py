"""Malicious templates: each is refused within seconds and little memory, and the next template renders."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from tests.chat.conftest import slow_unless
from tokentape.chat import _limits as limits
from tokentape.chat._template import ChatTemplate
from tokentape.errors import TemplateRefused, TokenizerUnusable

REFUSED = (TemplateRefused, TokenizerUnusable)
"""Slow for a single word is detected on loading, anything else on rendering."""

USER = [{"role": "user", "content": "hi"}]


BIG = "{% set s = 'a' * 60000000 %}"
EACH = "{% for i in range(100000) %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
DEEP_LIST = (
    "{% set ns = namespace(x=[], y=[]) %}"
    "{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
"""Forty objects that are reached in 2^40 ways."""

DEEP_TUPLE = "{% set ns = namespace(x=()) %}{% for i in range(40) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
COLLIDING = "range(0, (2 ** 61 - 1) * 99999, 2 ** 61 - 1)"
"""Numbers of the same hash: a set or a dict compares each with all others."""

GROWING = "{% set ns = namespace(l=[]) %}" + EACH


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
        "{% for b in range(90000) %}{% for a in range(100000) if false %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(d=0) %}{% block a %}{% if ns.d < 30 %}{% set ns.d = ns.d + 1 %}{{ self.a() }}"
        "{{ self.a() }}{% set ns.d = ns.d - 1 %}{% endif %}{% endblock %}",
        "{% set _steps_left = joiner() %}{% block a scoped %}" + ENDLESS + "{% endblock %}",
        BIG + EACH + "{% if 'b' in s %}{% endif %}{% endfor %}",
        BIG + EACH + "{% set x = s.count('b') %}{% endfor %}",
        BIG + "{% set t = s ~ '' %}" + EACH + "{% if s == t %}{% endif %}{% endfor %}",
        BIG + EACH + "{% if s is lower %}{% endif %}{% endfor %}",
        "{% set s = 'a' * 2000000 %}{{ s.rfind('a' ~ 'b' ~ 'a' * 1000000) }}",
        "{% set s = 'a' * 2000000 %}{{ s.strip('b' * 1000000 ~ 'a') }}",
        "{% set l = [0] * 1000000 %}{{ ([l] * 1000000) | map('sum') | list }}",
        "{% set l = [0] * 1000000 %}" + EACH + "{% if 1 in l %}{% endif %}{% endfor %}",
        DEEP_LIST + "{{ ns.x == ns.y }}",
        DEEP_LIST + "{{ ns.x }}",
        DEEP_TUPLE + "{{ {ns.x: 1} }}",
        DEEP_TUPLE + "{{ {}[ns.x] }}",
        DEEP_TUPLE + "{{ {}.get(ns.x) }}",
        DEEP_TUPLE + "{{ [ns.x] | unique | list }}",
        EACH + "{% set x = range(99999).count(1.5) %}{% endfor %}",
        EACH + "{% set x = 1.5 in range(99999) %}{% endfor %}",
        "{% macro m() %}{{ varargs | length }}{% endmacro %}" + EACH + "{{ m(*range(99999)) }}{% endfor %}",
        "{{ range(99999) | map('string') | map('list') | map('sort') | map('join') | list }}" * 200,
        "{% set l = [0] * 100000 %}" + EACH + "{{ l | max }}{% endfor %}",
        "{% set l = [0] * 100000 %}{{ ([1.5] * 1000000) | select('in', l) | list }}",
        BIG + "{% set t = s ~ '' %}{{ ([s] | batch(1) | map('first') | map('eq', t)) | list }}" + "{{ s == t }}" * 1000,
        BIG + EACH + "{% for c in s if false %}{% endfor %}{% endfor %}",
        "{% set l = [{'a': 1}] * 100000 %}" + EACH + "{{ l | sort(attribute='a') | length }}{% endfor %}",
        "{{ ('a' * 3000000) | trim('b' * 3000000 ~ 'a') }}",
        "{% set s = '1' * 20000000 %}" + EACH + "{% set x = s.isdigit() %}{% endfor %}",
        f"{{{{ dict.fromkeys({COLLIDING}) }}}}",
        f"{{{{ {COLLIDING} | unique | list | length }}}}",
        f"{{% set p = {COLLIDING} | batch(1) | map('sum') | batch(1) | map('batch', 2, 0) | map('first') | list %}}"
        "{% set ns = namespace(p) %}",
        "{{ range(99999) | map('round', -99999) | list }}",
        "{% set n = 7 ** 20000 %}" + EACH + "{% set x = n // (n // 5 ** 10000) %}" * 100 + "{% endfor %}",
        "{% set l = [range(100) | list] * 100000 %}" + EACH + "{% set x = l | tojson(indent=1) %}{% endfor %}",
        EACH + "{% set x = ([[1] * 10000] * 100) | sum(start=[]) %}{% endfor %}",
        "{% set v = dict.fromkeys(range(60000) | map('string')).keys() %}"
        "{{ range(400) | map(attribute='x', default=v) | list | length }}",
        "{{ ('%%' * 30000000) % () }}",
        "{{ ('{}' * 4000000).format(1) }}",
        "{% set l = [{'a': 1}] * 100000 %}{{ l | sort(attribute='" + "a." * 10000 + "a') }}",
    ],
    ids=lambda source: source[:60],
)
@pytest.mark.parametrize("seconds", [0.02, pytest.param(limits.MOST_SECONDS, marks=pytest.mark.slow)])
def test_endless_templates_are_stopped(source: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_SECONDS", seconds)
    start = time.thread_time()
    with pytest.raises(REFUSED, match=f"more than {seconds} seconds|makes |parts|a long text for"):
        render(source)
    # A refusal other than for time takes two renderings: the first tests whether only content parts are accepted.
    assert time.thread_time() - start < 2 * (seconds + 1)
    assert render("{{ messages[0].content }}") == "hi"


HUGE = [
    "{{ 'a' * 800000000 }}",
    "{{ [0] * 800000000 }}",
    "{{ 800000000 * 'a' }}",
    "{% set ns = namespace(s='aaaaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='aaaaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1, 2, 3]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{{ 9 ** 999999999 }}",
    "{{ ('- ' * 10000000) | title }}",
    "{{ ('- ' * 10000000) | urlencode }}",
    "{{ ('\\n' * 10000000) | indent(0) }}",
    "{{ ['\\x01' * 30000000] | tojson(indent=-100) }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(450) %}{% set ns.x = [ns.x] %}{% endfor %}"
    "{{ ([ns.x] * 1000) | tojson(indent=500) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ 'a' | indent(999999999, true) }}",
    "{{ 'a'.ljust(999999999) }}",
    "{{ 'a'.zfill(width) if false else 'a'.zfill(999999999) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ range(999999999) | list }}",
    "{{ [1, 2] | slice(999999999) | list }}",
    "{% set s = 'a' * 100000 %}{{ s.replace('a', s) }}",
    "{% set s = 'a' * 60000 %}{{ s | replace('a', s) }}",
    "{% set s = 'a' * 20000 %}{{ s.join(s) }}",
    "{% set s = 'a' * 20000 %}{{ (s | list) | join(s) }}",
    "{% set s = ('a' * 100000) | safe %}{{ s.replace('a', '<' * 100000) }}",
    "{{ ('a\\t' * 100000).expandtabs(90000) }}",
    "{{ 'a'.encode() * 4000000000 }}",
    "{{ (1).to_bytes(4000000000, 'big') }}",
    BIG + "{{ '%s%s%s%s%s%s%s%s%s%s%s%s' % (s, s, s, s, s, s, s, s, s, s, s, s) }}",
    BIG + "{{ '%s%s%s%s%s%s%s%s%s%s%s%s' | format(s, s, s, s, s, s, s, s, s, s, s, s) }}",
    BIG + "{{ '{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}{0}'.format(s) }}",
    "{{ '{:{w}}'.format(1, w=999999999) }}",
    "{{ '{:{w}}'.format(1, w='999999999') }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d' is odd }}",
    "{{ '%*d' is divisibleby((999999999, 1)) }}",
    "{{ '' ~ ['a' * 100000] * 100000 }}",
    "{{ ['a' * 100000] * 100000 }}",
    "{{ (['a' * 100000] * 100000) | string }}",
    "{{ (['a' * 100000] * 100000) | tojson }}",
    "{{ (['a' * 100000] * 100000) | join }}",
    "{{ [[[1] * 1000] * 100] | tojson(indent=99999) }}",
    "{{ [[1]] | tojson(indent=800000000) }}",
    BIG + "{{ ([1] * 100000) | tojson(separators=(s, s)) }}",
    "{{ ('a\\n' * 100000) | indent('x' * 1000000) }}",
    BIG + "{{ s | list }}",
    "{{ ('a ' * 30000000).split() }}",
    "{{ ('a\\n' * 30000000).splitlines() }}",
    "{{ ([[0] * 1000] * 100000) | sum(start=[]) }}",
    BIG + "{% for i in range(1000) %}{{ s }}{% endfor %}",
    BIG + GROWING + "{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
    GROWING + "{% set ns.l = ns.l + ['a' * 60000000] %}{% endfor %}",
    "{{ range(99999) | map('batch', 100000, 0) | map('list') | list }}",
    "{{ dict.fromkeys(range(999) | map('string'), 'a' * 100000) }}",
    "{{ dict.fromkeys(range(99999), 'a' * 100000) }}",
    "{{ ([1] * 1000) | batch(9999, 'a' * 100000) | list }}",
    "{{ [{}] * 100000 | map(attribute='x', default='a' * 100000) | list }}",
    "{% set ns = namespace(s='a' * 60000000) %}{{ [ns] * 1000 }}",
    "{% set ns = namespace(s='a' * 60000000) %}{{ '{0.s}{0.s}{0.s}{0.s}{0.s}'.format(ns) }}",
    BIG + "{% macro m(n) %}{% set t = s[n:] %}{% if n %}{{ m(n - 1) }}{% endif %}{{ t }}{% endmacro %}{{ m(99) }}",
    "{% set ns = namespace(x=2) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x % 7 }}",
    "{{ [namespace(s='A' * 1000000)] * 1000 | sort(attribute='s') | length }}",
    "{{ [cycler('A' * 1000000)] * 1000 | unique(attribute='current') | list | length }}",
    "{{ [{}] * 1000 | groupby('s', default='A' * 1000000) | length }}",
    "{{ ('f' * 60000000) | int(0, 16) // ('f' * 30000000) | int(0, 16) }}",
]
COSTLY = ("{{ ('a\\n' * 30000000).splitlines() }}", "{{ dict.fromkeys(range(99999), 'a' * 100000) }}")
"""Refused only after tenths of a second."""


@pytest.mark.parametrize(
    "source",
    # Strings of 60 MB take half a second each.
    [
        slow_unless(
            expression,
            HUGE[-1],
            *(expression for expression in HUGE if "0000000 %}" not in expression and expression not in COSTLY),
        )
        for expression in HUGE
    ],
    ids=lambda source: source[:60],
)
def test_huge_values_are_refused(source: str) -> None:
    tracemalloc.start()
    with pytest.raises(REFUSED):
        render(source)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Not proportional to the requested size.
    assert most < 2**29
    assert render("{{ messages[0].content }}") == "hi"


@pytest.mark.parametrize("most", [2**20, pytest.param(limits.MOST_CHARACTERS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "source",
    [
        GROWING + "{% set ns.l = [ns.l, [1] | batch(100000, 0) | list] %}{% endfor %}",
        "{% set d = dict.fromkeys(range(100000) | map('string')) %}"
        + GROWING
        + "{% set ns.l = [ns.l, d.copy()] %}{% endfor %}",
    ],
    ids=["batch", "copy"],
)
def test_endless_lists_are_refused(source: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_CHARACTERS", most)
    test_huge_values_are_refused(source)


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
def test_templates_can_not_access_python_internals(source: str) -> None:
    try:
        text = render(source)
    except TemplateRefused:
        return
    assert "class" not in text
    assert "function" not in text


INDENTED = '{\n"k": [\n1\n]\n}{"a": 2, "b": 1}'


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
        ("{{ 'a,b'.split(',') }}{{ 'aXa'.replace('X', '-') }}{{ '-'.join(['a', 'b']) }}", "['a', 'b']a-aa-b"),
        ("{{ [1, 2] | join('-') }}{{ 'aXa' | replace('X', '-') }}{{ '%s!' | format('a') }}", "1-2a-aa!"),
        ("{{ 'a\\nb' | indent(2) }}{{ {'k': [1, none]} | tojson(indent=1) }}", 'a\n  b{\n "k": [\n  1,\n  null\n ]\n}'),
        ("{{ 1 < 2 < 3 }}{{ 3 in [1, 2] }}{{ 'k' not in {'k': 1} }}{{ 'b' in 'abc' }}", "TrueFalseFalseTrue"),
        ("{{ [1, 2, 3][1:] }}{{ 'abc'[::-1] }}{{ {'a': 1}['a'] }}{% set a, b = 1, 2 %}{{ a + b }}", "[2, 3]cba13"),
        ("{{ ('<' | safe) + '<' }}{{ ' a ' | safe | trim }}{{ 5 - 2 }}{{ 7 // 2 }}{{ 1 / 2 }}", "<&lt;a330.5"),
        ("{{ [3, 1]|sort }}{{ [{'a': 1}] | map(attribute='a') | first }}{{ [1] | select('odd') | first }}", "[1, 3]11"),
        ("{% set n = namespace(a=none) %}{{ n.a }}{{ n.b is defined }}{{ n.b }}{{ n.b | default('x') }}", "NoneFalsex"),
        ("{{ 'a b' | wordcount }}{{ 'a b/c' | urlencode }}", "2a%20b/c"),
        ("{% autoescape false %}{{ '<' }}{% endautoescape %}{{ [[1], [2]] | sum(start=[]) }}", "<[1, 2]"),
        ("{{ 'a\\tb'.expandtabs(4) }}{{ 'ab' | reverse }}", "a   bba"),
        ("{{ '100000: %s' % 'x' }}{{ '100000{:>2}'.format(3) }}{{ '%%100000' % () }}", "100000: x100000 3%100000"),
        ("{{ 1.5 * 90000000 }}{{ 'a' | truncate(200000) }}{{ 'x' | int(900000) }}", "135000000.0a900000"),
        ("{{ 'abc'.find('c', -200000) }}{{ '%(a)5s' % {'a': 'b'} }}{{ '%-*d|' % (3, 1) }}", "2    b1  |"),
        ("{{ {'k': [1]} | tojson(indent=-1) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", INDENTED),
        ("{{ '%d ' | format(1732380000) }}{{ '%05d' % 123456 }}{{ '%d' % 100001 }}", "1732380000 123456100001"),
        ("{{ 'a\\nb' | indent(4, none) }}{{ 'a\\nb' | indent(first=x, width='-') }}", "a\n    ba\n-b"),
        ("{% for a in range(6) if a is even %}{{ a }}{% endfor %}{% block b %}x{% endblock %}", "024x"),
    ],
)  # fmt: skip
def test_ordinary_template_features_work(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.parametrize("name", ["float", "int", "reverse"])
def test_long_text_is_limited_in_filters_that_iterate_it(name: str) -> None:
    source = "{{ messages[0].content | " + name + " | string | length }}"
    assert _render(source, [{"role": "user", "content": "1" * 2_000_000}])


@pytest.mark.parametrize("source", ["{{ c.lstrip('x') }}", "{{ c | trim('x') }}", "{{ c.split('</think>')[-1][1:] }}"])
def test_a_text_of_megabytes_is_stripped_and_split(source: str) -> None:
    text = "x" + "a" * 9_000_000
    assert _render("{% set c = messages[0].content %}" + source, [{"role": "user", "content": text}]) == text[1:]


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%s|%s|%s|%s|%s|%s' % (c, c, c, c, c, c) }}",
        "{{ '%s|%s|%s|%s|%s|%s' | format(c, c, c, c, c, c) }}",
        "{{ '{}|{}|{}|{}|{}|{}'.format(c, c, c, c, c, c) }}",
        "{{ '{0}|{0}|{0}|{0}|{0}|{0}'.format(c) }}",
    ],
    ids=["%", "filter", "method", "repeated"],
)
def test_a_text_of_megabytes_is_formatted(source: str) -> None:
    text = "a" * 3_000_000
    rendered = _render("{% set c = messages[0].content %}" + source, [{"role": "user", "content": text}])
    assert rendered == "|".join([text] * 6)


def test_size_check_of_a_dict_view_respects_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_SECONDS", 0.0)
    with pytest.raises(limits.TimeOver):
        limits.Usage().weigh(dict.fromkeys("ab").keys())


def test_long_conversation_is_accepted() -> None:
    messages = [{"role": "user", "content": "hi"}] * 20_000
    source = "{% for m in messages %}{% for k in m %}{% endfor %}{{ m.role }}{% endfor %}"
    assert len(_render(source, messages)) == 80_000


def test_many_messages_do_not_extend_the_limit_to_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(limits, "MOST_FOR_MESSAGES", 0.1)
    with pytest.raises(TemplateRefused, match=r"more than 0\.\d+ seconds"):
        _render("{% if messages | length > 9 %}" + ENDLESS + "{% endif %}", USER * 1000)


def test_fromkeys_accepts_the_keys_of_a_dict() -> None:
    assert render("{{ dict.fromkeys({'a': 1}) }}") == "{'a': None}"


@pytest.mark.parametrize("literal", ["dict(pairs)", "dict.fromkeys(range(65))", "dict(x=dict.fromkeys(range(65))).x"])
def test_dict_with_many_keys_other_than_text_is_refused(literal: str) -> None:
    pairs = "{% set pairs = range(65) | batch(1) | map('batch', 2, 0) | map('first') | list %}"
    with pytest.raises(REFUSED, match="more than 64 non-string keys"):
        render(pairs + "{% set d = " + literal + " %}")
    assert render(pairs.replace("65", "64") + "{{ " + literal.replace("65", "64") + " | length }}") == "64"


@pytest.mark.parametrize(
    "source",
    [
        "{{ {" + ", ".join(f"{key}: 0" for key in range(65)) + "} }}",
        "{{ '%s' | urlize }}",
        "{% autoescape true %}x{% endautoescape %}",
        "{{ 'a b' | pprint }}",
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "9" * 5000 + " }}",
    ],
    ids=lambda source: source[:40],
)
def test_template_that_does_not_compile_is_refused_on_loading(source: str) -> None:
    with pytest.raises(TokenizerUnusable):
        ChatTemplate(source)


def test_template_that_exhausts_memory_is_refused() -> None:
    def without_memory() -> str:
        raise MemoryError

    with pytest.raises(TemplateRefused, match="MemoryError"):
        ChatTemplate("{{ f() }}").render(
            USER, tools=[], add_generation_prompt=True, date="2026-01-01", variables={"f": without_memory}
        )


@pytest.mark.parametrize("source", ["{{ cycler(*[]) }}", "{{ 'abc' | truncate(2) }}"])
def test_no_other_error_leaves_a_template(source: str) -> None:
    with pytest.raises(TemplateRefused, match=r"failed on this conversation: (RuntimeError|AssertionError)"):
        render(source)


def test_template_too_slow_for_a_single_word_is_refused_on_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_SECONDS", 0.02)
    start = time.thread_time()
    with pytest.raises(TokenizerUnusable, match="one word"):
        ChatTemplate(ENDLESS)
    assert time.thread_time() - start < 0.5


def test_integers_of_a_caller_are_written() -> None:
    number = 3**9000
    template = ChatTemplate("{{ n }}{{ n + 1 }}{{ n | tojson }}")
    rendered = template.render(USER, tools=[], add_generation_prompt=True, date="2026-01-01", variables={"n": number})
    assert rendered == f"{number}{number + 1}{number}"


def test_time_limit_grows_with_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_SECONDS", 0.02)
    all_for_each = "{% for m in messages %}{% for n in messages %}{{ n.role[:1] }}{% endfor %}{% endfor %}"
    assert len(_render(all_for_each, USER * 400)) == 400 * 400
    with pytest.raises(TemplateRefused, match=r"more than 0\.0[234] seconds"):
        _render("{% if messages[0].content == 'hi' %}" + ENDLESS + "{% endif %}", USER)


def test_the_limits_grow_with_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_CHARACTERS", 2**16)
    source = "{{ messages | tojson }}"
    messages = [{"role": "user", "content": "hi"}] * 2000
    assert len(_render(source, messages)) > 2**16
    with pytest.raises(TemplateRefused, match="longer than"):
        render("{{ 'a' * 100000 }}")


def test_long_strings_that_a_template_compares_are_not_kept() -> None:
    made = "{% for n in range(600) %}{% if 'x' * 100000 ~ n == messages[0].content %}{% endif %}{% endfor %}"
    template = ChatTemplate(made + "{{ messages[0].content }}")
    tracemalloc.start()
    strings = template.compared.strings
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert strings == ("x",)
    assert most < 2**24
