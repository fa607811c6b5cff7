"""Text after a turn may depend on rare details of the history or the turn. Bridges are compared with the template."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.conftest import load_tokenizer, setup_for
from tokentape.chat import _grammar as grammar
from tokentape.chat._certification import certify
from tokentape.chat._compared_strings import compared
from tokentape.chat._renderer import Renderer
from tokentape.chat._strategy import choose
from tokentape.chat._template import ChatTemplate, parse_template
from tokentape.types import Media, Message

HEAD = "{% set ns = namespace(n=0, calls=0, rule='', plan=false, who='', deep=false, thought=false) %}"
BODY = (
    "<|im_start|>{{ m.role }}\n{{ note }}{{ m.content or '' }}{% for t in m.tool_calls or [] %}"
    "<tool_call>{{ t.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def written(each: str, *, before: str = "", prompt: str = "") -> str:
    """Return a template with a body for each message, which may set `note`, and with text in its prompt."""
    body = "{% for m in messages %}{% set note = '' %}" + each + BODY
    return HEAD + before + body + PROMPT.replace("assistant", f"assistant{prompt}")


def user(text: str, **fields: str) -> Message:
    return {"role": "user", "content": text, **fields}


def assistant(text: str, **fields: str) -> Message:
    return {"role": "assistant", "content": text, **fields}


def step(n: int) -> tuple[Message, Message]:
    """Return a call and its result."""
    function = {"name": "look", "arguments": {"q": "x"}}
    calling = {"id": f"call{n:05d}", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": calling["id"], "name": "look", "content": "ok"}
    return {"role": "assistant", "content": "", "tool_calls": [calling]}, result


def calling(**arguments: object) -> Message:
    call, _ = step(1)
    function = {"name": "look", "arguments": arguments}
    return {**call, "tool_calls": [{**call["tool_calls"][0], "function": function}]}


EXCHANGES = [user("1"), assistant("1"), user("2"), assistant("2"), user("3")]
REMINDS = (
    "{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% if NTH %}{% set note = 'Note. ' %}{% endif %}{% endif %}"
)
COUNTS = (
    "{% if m.role == 'user' %}{% set ns.calls = 0 %}{% endif %}"
    "{% if m.tool_calls %}{% set ns.calls = ns.calls + 1 %}{% endif %}"
)
CASES: dict[str, tuple[str, list[Message], Message, Message]] = {
    "every fourth turn": (written(REMINDS.replace("NTH", "ns.n % 4 == 0")), EXCHANGES, assistant("3"), user("4")),
    "divisible by four": (
        written(REMINDS.replace("NTH", "ns.n is divisibleby(4)")),
        EXCHANGES,
        assistant("3"),
        user("4"),
    ),
    "more than a variable says": (
        written(REMINDS.replace("NTH", "ns.n > most"), before="{% set most = 6 %}"),
        [*EXCHANGES[:-1] * 3, user("7")],
        assistant("7"),
        user("8"),
    ),
    "calls since the user's message": (
        written(COUNTS, prompt="{{ ' (wrap up)' if ns.calls > 5 else '' }}"),
        [user("go"), *(message for n in range(5) for message in step(n))],
        step(5)[0],
        step(5)[1],
    ),
    "a word from a list": (
        written(
            "{% for w in ['urgent', 'asap'] %}{% if w in (m.content or '') %}{% set ns.deep = true %}{% endif %}"
            "{% endfor %}",
            prompt="{{ ' (fast)' if ns.deep else '' }}",
        ),
        [user("it is urgent")],
        assistant("yes"),
        user("go"),
    ),
    "two words in one text": (
        written(
            "{% if 'think' in (m.content or '') and 'hard' in m.content %}{% set ns.deep = true %}{% endif %}",
            prompt="{{ ' (deep)' if ns.deep else '' }}",
        ),
        [user("think hard")],
        assistant("yes"),
        user("go"),
    ),
    "a system message within the conversation": (
        written(
            "{% if m.role == 'system' and not loop.first %}{% set ns.rule = m.content %}{% endif %}",
            prompt="{{ ' (' + ns.rule + ')' if ns.rule else '' }}",
        ),
        [user("1"), assistant("1"), {"role": "system", "content": "in French"}, user("2")],
        assistant("2"),
        user("3"),
    ),
    "a developer message": (
        written(
            "{% if m.role == 'developer' %}{% set ns.rule = 'dev' %}{% endif %}",
            prompt="{{ ' (' + ns.rule + ')' if ns.rule else '' }}",
        ),
        [{"role": "developer", "content": "in French"}, user("2")],
        assistant("2"),
        user("3"),
    ),
    "who spoke before": (
        written(
            "{% if m.name and m.role == 'user' and m.name != ns.who %}{% set note = m.name + ': ' %}"
            "{% set ns.who = m.name %}{% endif %}"
        ),
        [user("1", name="Ada")],
        assistant("1"),
        user("2", name="Ada"),
    ),
    "how the turn before ends": (
        written(
            "{% set before = messages[loop.index0 - 1] if not loop.first else {} %}"
            "{% if (before.content or '').endswith('?') %}{% set note = 'Answer: ' %}{% endif %}"
        ),
        [user("1")],
        assistant("Which \n?"),
        user("2"),
    ),
    "whether a tool was used": (
        written(
            "{% for t in m.tool_calls or [] %}{% if t.function.name == 'look' %}{% set ns.deep = true %}{% endif %}"
            "{% endfor %}",
            prompt="{{ ' (cite)' if ns.deep else '' }}",
        ),
        [user("1"), *step(1)],
        assistant("1"),
        user("2"),
    ),
    "a long text": (
        written("{% if m.content | length > 900 %}{% set ns.deep = true %}{% endif %}", prompt="{{ ns.deep }}"),
        [user("a b " * 300)],
        assistant("1"),
        user("2"),
    ),
    "more messages than are tried": (
        written("{% if loop.index > 150 %}{% set ns.deep = true %}{% endif %}", prompt="{{ ns.deep }}"),
        EXCHANGES[:-1] * 40 + EXCHANGES[-1:],
        assistant("3"),
        user("4"),
    ),
    "a number in a text": (
        written(
            "{% if m.role == 'user' and m.content | int > 10 %}{% set ns.deep = true %}{% endif %}",
            prompt="{{ ns.deep }}",
        ),
        [user("42")],
        assistant("1"),
        user("2"),
    ),
    "a text of digits": (
        written(
            "{% if m.role == 'user' and m.content.isdigit() %}{% set ns.deep = true %}{% endif %}",
            prompt="{{ ns.deep }}",
        ),
        [user("7")],
        assistant("one"),
        user("two"),
    ),
    "the length of a text by two": (
        written(
            "{% if m.role == 'user' and m.content | length % 2 %}{% set ns.deep = true %}{% endif %}",
            prompt="{{ ns.deep }}",
        ),
        [user("abc")],
        assistant("1"),
        user("no"),
    ),
    "a line break": (
        written(
            "{% if m.role == 'user' and '\\n' in m.content %}{% set ns.deep = true %}{% endif %}",
            prompt="{{ ns.deep }}",
        ),
        [user("a\nb")],
        assistant("1"),
        user("2"),
    ),
    "how many words a text has": (
        written("{% if m.content | wordcount > 30 %}{% set ns.deep = true %}{% endif %}", prompt="{{ ns.deep }}"),
        [user("so " * 40)],
        assistant("1"),
        user("2"),
    ),
    "the name of a field": (
        written("{% if 'tool_calls' in m.content %}{% set ns.deep = true %}{% endif %}", prompt="{{ ns.deep }}"),
        [user("tool_calls")],
        assistant("1"),
        user("2"),
    ),
    "a word in a dict": (
        written(
            "{% if m.role == 'user' and m.content in {'/deep': 1} %}{% set ns.deep = true %}{% endif %}",
            prompt="{{ ns.deep }}",
        ),
        [user("/deep")],
        assistant("1"),
        user("2"),
    ),
    "a word that a filter makes": (
        written(
            "{% if ['/de', 'ep'] | join in m.content %}{% set ns.deep = true %}{% endif %}",
            prompt="{{ ns.deep }}",
        ),
        [user("/deep")],
        assistant("1"),
        user("2"),
    ),
    "a word that a macro in a set block writes": (
        written(
            "{% if word in m.content %}{% set ns.deep = true %}{% endif %}",
            before="{% macro deep() %}{{ '/de' }}ep{% endmacro %}{% set word %}{{ deep() }}{% endset %}",
            prompt="{{ ns.deep }}",
        ),
        [user("go /deep")],
        assistant("1"),
        user("2"),
    ),
    "how the name of a tool ends": (
        written(
            "{% for t in m.tool_calls or [] %}{% if t.function.name.endswith('ook') %}{% set ns.deep = true %}"
            "{% endif %}{% endfor %}",
            prompt="{{ ns.deep }}",
        ),
        [user("1"), *step(1)],
        assistant("1"),
        user("2"),
    ),
    "a word in the arguments of a call": (
        written(
            "{% for t in m.tool_calls or [] %}{% if 'rm -rf' in t.function.arguments | tojson %}"
            "{% set ns.deep = true %}{% endif %}{% endfor %}",
            prompt="{{ ns.deep }}",
        ),
        [user("1"), calling(command="rm -rf x"), step(1)[1]],
        assistant("1"),
        user("2"),
    ),
    "a key that is read from the arguments of a call": (
        written(
            "{% for t in m.tool_calls or [] %}{% set given = t.function.arguments %}{% if given.speed == 'fast' %}"
            "{% set ns.deep = true %}{% endif %}{% endfor %}",
            prompt="{{ ns.deep }}",
        ),
        [user("1"), calling(speed="fast"), step(1)[1]],
        assistant("1"),
        user("2"),
    ),
    "an argument that is null": (
        written(
            "{% for t in m.tool_calls or [] %}{% if t.function.arguments.get('speed', 1) is none %}"
            "{% set ns.deep = true %}{% endif %}{% endfor %}",
            prompt="{{ ns.deep }}",
        ),
        [user("1"), calling(speed=None), step(1)[1]],
        assistant("1"),
        user("2"),
    ),
    "a made word that is looked for if there are tools": (
        written(
            "{% if tools and ['/de', 'ep'] | join in m.content %}{% set ns.deep = true %}{% endif %}",
            prompt="{{ ns.deep }}",
        ),
        [user("/deep")],
        assistant("1"),
        user("2"),
    ),
    "a word in earlier reasoning": (
        written(
            "{% if loop.index0 == 1 and messages | length > 3 and 'unsure' in (m.reasoning_content or '') %}"
            "{% set ns.deep = true %}{% endif %}",
            prompt="{{ ns.deep }}",
        ),
        [user("1"), assistant("1", reasoning_content="I am unsure."), user("2")],
        assistant("1"),
        user("2"),
    ),
    "a result without text": (
        written(
            "{% if m.role == 'tool' and not m.content %}{% set ns.deep = true %}{% endif %}", prompt="{{ ns.deep }}"
        ),
        [user("1"), step(1)[0], {**step(1)[1], "content": ""}],
        assistant("1"),
        user("2"),
    ),
    "how often a sign occurs": (
        written("{% if m.content.count('!') > 2 %}{% set ns.deep = true %}{% endif %}", prompt="{{ ns.deep }}"),
        [user("go!!!")],
        assistant("1"),
        user("2"),
    ),
    "whether a text has signs": (
        written(
            "{% if m.content.replace('@', '') != m.content %}{% set ns.deep = true %}{% endif %}",
            prompt="{{ ns.deep }}",
        ),
        [user("hi @bob")],
        assistant("1"),
        user("2"),
    ),
    "whether a user repeats the question": (
        written("{% if not loop.first and m.content == messages[0].content %}{% set note = 'Again. ' %}{% endif %}"),
        [user("ping")],
        assistant("1"),
        user("ping"),
    ),
    "how many arguments a call had": (
        written(
            "{% for t in m.tool_calls or [] %}{% if t.function.arguments | length > 3 %}{% set ns.deep = true %}"
            "{% endif %}{% endfor %}",
            prompt="{{ ns.deep }}",
        ),
        [user("1"), calling(a=1, b=2, c=3, d=4), step(1)[1]],
        assistant("1"),
        user("2"),
    ),
    "a word beside an earlier call": (
        written(
            "{% if m.tool_calls and 'se' ~ 'cret' in m.content %}{% set ns.deep = true %}{% endif %}",
            prompt="{{ ns.deep }}",
        ),
        [user("1"), {**step(1)[0], "content": "my secret"}, step(1)[1]],
        assistant("1"),
        user("2"),
    ),
    "a word at the beginning of a long conversation": (
        written(
            "{% if messages | length > 7 and loop.first and 'boost' in m.content %}{% set ns.deep = true %}{% endif %}",
            prompt="{{ ns.deep }}",
        ),
        [user("boost it"), *[assistant("1"), user("2")] * 3],
        assistant("4"),
        user("5"),
    ),
    "a word in a late result": (
        written(
            "{% if m.role == 'tool' and loop.index0 > 4 and 'ERROR' in m.content %}{% set ns.deep = true %}{% endif %}",
            prompt="{{ ns.deep }}",
        ),
        [*EXCHANGES, step(1)[0], {**step(1)[1], "content": "ERROR 5"}, assistant("4"), user("5")],
        assistant("5"),
        user("6"),
    ),
    "whether the turn has reasoning": (
        written(
            "{% if m.role == 'assistant' %}{% set ns.thought = m.reasoning_content is defined %}{% endif %}",
            prompt="{{ ' (thinks on)' if ns.thought else '' }}",
        ),
        [user("1")],
        assistant("1", reasoning_content="Hm."),
        user("2"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bridges_match_the_template(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "NAMES", ("user", "tool"))
    source, history, reply, new = CASES[name]
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(source))
    setup = setup_for(renderer)
    strategy = choose(renderer, certify(renderer), reply, [new], setup, history)
    close = [renderer.tokenizer.control("<|im_end|>").id]
    ids = renderer.bridge(
        renderer.tokenizer.array(close), reply, [new], setup, history if strategy == "contextual" else None
    ).ids
    whole = renderer.render([*history, reply, new], setup).ids.tolist()
    assert whole[-len(ids) - 1 :] == close + ids.tolist()


def test_tool_with_an_unusual_field_is_probed_with_it() -> None:
    source = (
        written(
            "{% for t in tools or [] %}{% if t.function.name == m.name and t.function.output_schema %}"
            "{% set note = 'Structured: ' %}{% endif %}{% endfor %}"
        )
        .replace("{% set note = '' %}", "{% set note = namespace(s='') %}")
        .replace("set note = 'S", "set note.s = 'S")
        .replace("{{ note }}", "{{ note.s }}")
    )
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(source))
    function: dict[str, Any] = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
    setup = renderer.setup([{"type": "function", "function": {**function, "output_schema": {"type": "object"}}}])
    reply, result = step(1)
    ids = renderer.bridge(
        renderer.tokenizer.array([renderer.tokenizer.control("<|im_end|>").id]), reply, [result], setup
    ).ids
    whole = renderer.render([user("go"), reply, result], setup).ids.tolist()
    assert whole[-len(ids) :] == ids.tolist()


def test_a_result_that_repeats_its_call_starts_a_new_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "NAMES", ("user", "tool"))
    source = written(
        "{% if m.tool_calls %}{% set ns.rule = m.tool_calls[0].function.arguments | tojson %}{% endif %}"
        "{% if m.role == 'tool' %}{% set note = ns.rule + ' gives ' %}{% endif %}"
    )
    certificate = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(source)))
    assert [continuation.strategy for continuation in certificate.continuations] == ["local", "fork"]


def test_reasoning_opener_with_a_budget_opens_reasoning() -> None:
    effort = "{{ 'high' if '/deep' in messages[0].content else 'low' }}"
    thought = "<think>[" + effort + "]\n{{ m.reasoning_content or '' }}\n</think>\n"
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + thought + "{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "<think>[" + effort + "]\n{% endif %}"
    )
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(source))
    setup = setup_for(renderer)
    for text in ("go", "/deep go"):
        prompt = renderer.render([user(text)], setup).ids
        parser = renderer.parser(setup, prompt_ids=prompt)
        parser.feed(renderer.tokenizer.encode_plain("so be it\n</think>\nYes.<|im_end|>"))
        reply = parser.finish()[1]
        assert (reply.reasoning.strip(), reply.content.strip()) == ("so be it", "Yes.")


def test_changed_end_of_content_is_not_part_of_the_suffix() -> None:
    source = (
        "{% for m in messages %}{% if m.content.endswith('ok') %}{% endif %}{{ m.role }}: {{ m.content | upper }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(source))
    suffix = renderer.suffix(assistant("Why ok"), [user("2")], setup_for(renderer), [user("1")])
    assert suffix == "\nuser: 2\nassistant:"


@pytest.mark.parametrize(
    "compares",
    [
        "{% macro has(text, word) %}{{ word in text }}{% endmacro %}{{ has(m.content, word='/deep') }}",
        "{% macro has(text, word='/deep') %}{{ word in text }}{% endmacro %}{{ has(m.content) }}",
        "{% set modes = {'/deep': 1} %}{% if m.content in modes %}{% endif %}",
        "{% set mode = namespace(word='/deep') %}{% if mode.word in m.content %}{% endif %}",
        "{% for word, mode in [('/deep', 1)] %}{% if word in m.content %}{% endif %}{% endfor %}",
        "{% if m.content.replace('/deep', '') != m.content %}{% endif %}",
        "{% if messages | selectattr('content', 'equalto', '/deep') | list %}{% endif %}",
        "{% if m.content.startswith('/' ~ 'deep') %}{% endif %}",
        "{% if m.content in '/deep'.split(',') %}{% endif %}",
        "{% macro has(word) %}{% if word in m.content %}{% endif %}{% endmacro %}{{ has('/deep') }}",
        "{% macro has(word) %}{{ inner(word) }}{% endmacro %}{{ has('/deep') }}"
        "{% macro inner(word) %}{{ word }}{{ word in m.content }}{% endmacro %}",
        "{% macro put(word) %}{{ word }}{% endmacro %}{% if put('/deep') in m.content %}{% endif %}",
        "{% macro put(word) %}{{ word }}{% endmacro %}{% set x %}{{ put('/deep') }}{% endset %}{{ x in m.content }}",
        "{% set word = '/deep' %}{% macro put() %}{{ word }}{% endmacro %}{{ put() in m.content }}",
        "{% macro put(word) %}{{ word }}{% endmacro %}{% macro put(word) %}{{ word in m.content }}{% endmacro %}"
        "{{ put('/deep') }}",
        "{% macro put(words) %}{% for w in words %}{{ w }}{{ w in m.content }}{% endfor %}{% endmacro %}"
        "{{ put(['/deep']) }}",
        "{% for w in ['/deep'] %}{{ w }}{% if loop.previtem in m.content %}{% endif %}{% endfor %}",
        "{% macro put(word) %}{{ word | replace(m.content, '') }}{% endmacro %}{{ put('/deep') }}",
        "{% set mode = m.content %}{% set other = mode | trim %}{% if other == '/deep' %}{% endif %}",
        "{% set ns = namespace(mode='') %}{% set ns.mode = m.content %}{% if ns.mode == '/deep' %}{% endif %}",
    ],
)
def test_words_are_found_wherever_a_template_may_compare_them(compares: str) -> None:
    compares = f"{{% for m in messages %}}{compares}{{% endfor %}}"
    assert "/deep" in compared(parse_template(compares)).strings


def test_texts_that_are_only_written_are_not_tried() -> None:
    source = "{% set name = 'Written' %}{{ name }}{{ 'A' if n else 'B' }}{{ 'C' ~ n }}{{ raise_exception('D') }}"
    assert compared(parse_template(source)).strings == ()


TAGS = (
    "{% macro escaped(value) %}{{ value | string | replace('&', '+') }}{% endmacro %}"
    "{% macro kind(value) %}{{ 'text' if value is string else 'data' }}{% endmacro %}"
    "{% macro tag(name, pairs) %}{{ '<' + name }}{% for pair in pairs %}{{ pair[0] + escaped(pair[1]) }}{% endfor %}"
    "{% endmacro %}{% for m in messages %}{% set pairs = [('who', m.role)] %}{% set pairs = pairs + [('is', 'one')] %}"
    "{{ tag('message', pairs) }}{{ tag('think' if m.thought else 'say', [('as', kind(m.content))]) }}{% endfor %}"
)


def test_texts_that_macros_only_write_are_not_tried() -> None:
    assert ChatTemplate(TAGS).compared.strings == ("&", "+")


def test_words_compared_with_template_kwargs_are_not_tried() -> None:
    source = (
        "{% if effort is undefined %}{% set effort = format.kind or 'max' %}{% endif %}{% set level = effort | lower %}"
        "{% if level in ['low', 'high'] or choice == 'none' %}{{ level }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert ChatTemplate(source).compared.strings == ("max",)


def test_types_of_parts_are_not_tried() -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.type in ['image', 'photo'] }}{% endfor %}{% endfor %}"
    assert ChatTemplate(source).compared.strings == ()


def test_a_long_chain_of_variables_is_read_in_bounded_time() -> None:
    chain = "".join(f"{{% set a{n} = a{n + 1} %}}" for n in range(200))
    source = chain + "{% set a200 = messages[0].content %}{% if a0 == '/deep' %}{% endif %}"
    assert compared(parse_template(source)).strings == ("/deep",)


def test_calls_before_content_do_not_make_a_bridge_depend_on_the_history() -> None:
    calls = "{% for t in m.tool_calls or [] %}<tool_call>{{ t.function | tojson }}</tool_call>{% endfor %}"
    body = (
        f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{calls}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}"
    )
    certificate = certify(Renderer(load_tokenizer("qwen3"), ChatTemplate(body + PROMPT)))
    assert {continuation.strategy for continuation in certificate.continuations} == {"local"}


def test_compared_numbers_and_words_are_extracted() -> None:
    tree = parse_template(
        "{% set most = 9 %}{% macro has(text, word) %}{{ word in text }}{% endmacro %}{% if n > most %}{% endif %}"
        "{% if n % 7 == 0 or n is divisibleby(5) %}{% endif %}{{ has(m.content, '/deep') }}"
        "{% if m.name in ['run'] or m.content | trim | length > 500 %}{% endif %}"
    )
    assert compared(tree) == (("/deep",), ("run",), 9, 500, 7, ())


class Images:
    """An image processor that makes no tokens: no message under test has an image."""

    placeholder_id = 0
    settings = Media("0" * 64, "application/json", b"{}")

    def tokens(self, image: Media) -> int:
        raise AssertionError(image)


def test_text_that_counts_earlier_images_is_bridged_in_context() -> None:
    source = (
        "{% set ns = namespace(images=0) %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' %}{% set ns.images = ns.images + 1 %}{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}{% if ns.images %} (seen: {{ ns.images }}){% endif %}<|im_end|>\n{% endfor %}" + PROMPT
    )
    renderer = Renderer(load_tokenizer("qwen3"), ChatTemplate(source), images=Images())
    setup = setup_for(renderer, tools=())
    seen = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1"}]}]
    strategy = choose(renderer, certify(renderer), assistant("1"), [user("2")], setup, seen)
    assert strategy == "contextual"
