"""What templates may do with values (filters, tests, methods, operators), each paid for from the rendering's budget.

Most operations make no more than they are given, so that the budget looks at what went in and what came out. Those that
multiply (`replace`, `join`, formats) are looked at before. What chat templates have no use for is not here.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import wraps
from typing import Any

import jinja2
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.utils import _PassArg, pass_context

from tokentape.chat.budget import ESCAPED, ITEM, MOST_ITEMS, OBJECT, STEP, Budget, refuse_bits

MOST_NUMBER = 100_000
"""Largest width, count or precision that may be asked of a filter or a method, and longest format."""

BUDGET = "budget of this rendering"
"""The name under which a rendering is given its `Budget`: none that a template can write."""

UNUSED_FILTERS = (
    *("filesizeformat", "forceescape", "pprint", "random", "striptags", "urlencode", "urlize", "wordcount"),
    *("wordwrap", "xmlattr"),
)

METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(name for name in dir(str) if not name.startswith("_"))
    - {"encode", "expandtabs", "maketrans", "translate"},
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "grouper", "index", "list"}),
    int: frozenset({"bit_length"}),
    float: frozenset({"is_integer"}),
}
"""What templates may ask of values of Python's own kinds. Bytes and sets are made by no expression."""

_FREE_FILTERS = frozenset({"attr", "count", "d", "default", "first", "items", "last", "length", "tojson"})
_TEXT_FILTERS = frozenset(
    {"capitalize", "center", "e", "escape", "lower", "safe", "title", "trim", "truncate", "upper"}
)
_SIZED_FILTERS = frozenset({"batch", "center", "round", "slice", "truncate"})
_SORTING_FILTERS = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
_FROM_THE_END = frozenset({"rfind", "rindex", "rpartition", "rsplit"})
_STRIPPING = frozenset({"lstrip", "rstrip", "strip"})
_RECASING = frozenset({"capitalize", "casefold", "lower", "swapcase", "title", "upper"})
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_LONGEST_NEEDLE = 128
_PER_CHARACTER = 16
"""What a question of every character takes, against a search."""
_NUMBERS = re.compile(r"\d+")
_LONG_NUMBER = re.compile(r"\d{6}")
_PLAIN_FIELD = re.compile(r"\w*")


def binary(budget: Budget, operator: str, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """What an operator other than `+` does."""
    if operator == "*":
        return multiply(budget, left, right)
    if operator == "%" and isinstance(left, str):
        return printf(budget, left, right)
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        _refuse_others(operator, left, right)
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        refuse_bits(left.bit_length() * abs(right))
    return function(left, right)


def multiply(budget: Budget, left: Any, right: Any) -> Any:
    """What `*` does."""
    if isinstance(left, int) and isinstance(right, int):
        refuse_bits(left.bit_length() + right.bit_length())
        return left * right
    for several, count in ((left, right), (right, left)):
        if isinstance(count, int):
            if isinstance(several, str):
                budget.make(len(several) * max(count, 0))
            elif isinstance(several, list | tuple):
                budget.make_items(len(several) * max(count, 0))
    return left * right


def printf(budget: Budget, text: str, values: Any) -> str:
    """What `text % values` does."""
    _refuse_wide(text)
    if "*" in text:
        _refuse_large(values if isinstance(values, tuple) else (values,))
    fields = text.count("%") if isinstance(values, Mapping) else 1
    widths = sum(map(int, _NUMBERS.findall(text))) + MOST_NUMBER * text.count("*")
    budget.has_room(len(text) + widths + fields * ESCAPED * budget.weigh(values))
    return budget.made(text % values)  # type: ignore[no-any-return]


def str_format(text: str, formatting: Callable[..., str]) -> Callable[..., str]:
    """`formatting`, which is what `text.format` does, to be called with a context by `Sandbox.call`."""
    _refuse_wide(text)
    fields = [(field, spec or "") for _, field, spec, _ in string.Formatter().parse(text) if field is not None]
    if any("{" in spec or not _PLAIN_FIELD.fullmatch(field) for field, spec in fields):
        raise jinja2.TemplateError("it formats with a width that is given, or with a part of a value")
    widths = sum(int(number) for _, spec in fields for number in _NUMBERS.findall(spec))

    @pass_context
    def formatted(context: Context, *args: Any, **kwargs: Any) -> str:
        budget = _budget(context)
        size = budget.weigh([*args, kwargs])
        budget.has_room(len(text) + widths + len(fields) * ESCAPED * size)
        return budget.made(formatting(*args, **kwargs))  # type: ignore[no-any-return]

    return formatted


def string_method(budget: Budget, bound: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call of a string's method does."""
    text: str = bound.__self__  # type: ignore[attr-defined]
    name = bound.__name__
    length = len(text)
    most = 3 if type(text) is str else ESCAPED  # `Markup` escapes what it is given.
    if args or kwargs:
        _refuse_large((*args, *kwargs.values()))
        if name == "join":
            return budget.made(bound(_joinable(budget, args, length, most)))
        needle = 0
        for arg in args:
            if type(arg) is str:
                needle = max(needle, len(arg))
            else:
                budget.seen(arg)
        if needle > _LONGEST_NEEDLE and name not in _FROM_THE_END and name not in _STRIPPING:
            budget.look(needle)
            needle = _LONGEST_NEEDLE
        length *= 1 + needle // 16
    budget.look(_PER_CHARACTER * length if name.startswith("is") else length)
    if name in ("split", "rsplit") and len(text) > MOST_ITEMS:
        sep = args[0] if args else kwargs.get("sep")
        times = args[1] if len(args) > 1 else kwargs.get("maxsplit", -1)
        return _parts(budget, bound(sep, MOST_ITEMS if times < 0 else times))
    if name == "splitlines" and len(text) > MOST_ITEMS:
        budget.make_items(sum(map(text.count, _LINE_ENDS)))
    if name == "replace":
        _replaces(budget, most, text, *args)
    elif name in _RECASING:
        budget.has_room(most * len(text))
    made = bound(*args, **kwargs)
    return _parts(budget, made) if type(made) is list else budget.made(made)


def method(budget: Budget, bound: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call of a method of one of Python's own kinds does."""
    owner = bound.__self__  # type: ignore[attr-defined]
    if isinstance(owner, str):
        return string_method(budget, bound, args, kwargs)
    if isinstance(owner, dict):
        if args and type(args[0]) is not str:
            budget.seen(args[0])
    elif isinstance(owner, list | tuple):
        budget.look(len(owner) * (ITEM + sum(map(budget.weigh, args))))
    else:
        # That of a date: how it is to be written.
        for arg in args:
            _refuse_wide(str(arg))
    if bound.__name__ == "copy":
        budget.make(OBJECT * len(owner))
    return bound(*args, **kwargs)


def pay_for_call(budget: Budget, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pay for a call that makes an object of what it is given, such as `namespace(...)` and `dict(...)`."""
    budget()
    budget.look(ITEM * len(args))
    for arg in (*args, *(value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars"))):
        budget.seen(arg)
        if isinstance(arg, Sized) and not isinstance(arg, str | jinja2.Undefined):
            budget.make(OBJECT * len(arg))


def filters(known: Mapping[str, Any]) -> dict[str, Any]:
    """Jinja's filters as templates may use them."""
    own: dict[str, Any] = {"format": _format, "indent": _indent, "join": _join, "replace": _replace, "string": _string}
    paid = {name: _paid(name, function) for name, function in known.items() if name not in _FREE_FILTERS}
    free = {name: function for name, function in known.items() if name in _FREE_FILTERS}
    return {name: f for name, f in {**free, **paid, **own, "tojson": _tojson}.items() if name not in UNUSED_FILTERS}


def tests(known: Mapping[str, Any]) -> dict[str, Any]:
    """Jinja's tests, with those paid for that look through values."""

    def paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @pass_context
        def test(context: Context, value: Any, *args: Any) -> Any:
            budget = _budget(context)
            if name in ("odd", "even", "divisibleby"):
                if not isinstance(value, int | float) or not all(isinstance(arg, int | float) for arg in args):
                    _refuse_others("%", value, args)
            elif name in ("lower", "upper"):
                value = budget.text(value)
                budget.look(_PER_CHARACTER * len(value))
            elif name == "in":
                return budget.find(value, *args)
            else:
                budget.seen(value)
                for arg in args:
                    budget.seen(arg)
            return function(value, *args)

        return test

    looking = {"odd", "even", "divisibleby", "lower", "upper", "in"}
    comparing = {name for name, function in known.items() if function.__module__ == "_operator"}
    return {name: paid(name, f) if name in looking | comparing else f for name, f in known.items()}


def _budget(context: Context) -> Budget:
    budget = context.parent[BUDGET]
    assert isinstance(budget, Budget)
    return budget


def _paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Not evaluated while the template is compiled, when there is no budget: jinja2 leaves out what wants the context.
    passed = _PassArg.from_obj(function)

    @pass_context
    @wraps(function, assigned=("__name__", "__doc__"), updated=())
    def paid(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        if args or kwargs:
            if name in _SIZED_FILTERS:
                _refuse_large((*args, *kwargs.values()))
                budget.look(sum(8 * abs(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, int)))
            _refuse_long_path(name, args, kwargs)
        if name in _TEXT_FILTERS:
            value = _text_for(budget, name, value, args)
        elif isinstance(value, str):
            _look_through_characters(budget, name, value)
        else:
            value = _look_through_items(budget, name, value)
        if name == "sum" and not all(isinstance(start, int | float) for start in (*args[1:2], kwargs.get("start", 0))):
            raise jinja2.TemplateError("it sums up what are no numbers")
        if passed is not None:
            first = {_PassArg.context: context, _PassArg.eval_context: context.eval_ctx}.get(
                passed, context.environment
            )
            made = function(first, value, *args, **kwargs)
        else:
            made = function(value, *args, **kwargs)
        return budget.counted(made) if isinstance(made, Iterator) else budget.made(made)

    return paid


def _text_for(budget: Budget, name: str, value: Any, args: tuple[Any, ...]) -> str:
    text = value if isinstance(value, str) else budget.text(value)
    chars = max((len(arg) for arg in args if isinstance(arg, str)), default=0)
    budget.look(len(text) * (1 + chars // 16))
    budget.has_room((6 if name in ("e", "escape") else 3) * len(text))
    if name == "title":
        budget.make_items(len(text))
    return text


def _look_through_characters(budget: Budget, name: str, value: str) -> None:
    if name in ("abs", "float", "int", "reverse", "round"):
        budget.look(len(value))
    else:
        budget.make_items(len(value))
        budget.look(STEP // 8 * len(value) if name != "list" else 4 * len(value))


def _look_through_items(budget: Budget, name: str, value: Any) -> Any:
    if name in _SORTING_FILTERS:
        if isinstance(value, Iterator):
            value = list(value)
        budget.look(20 * budget.weigh(value))
    if isinstance(value, Sized) and not isinstance(value, jinja2.Undefined):
        budget.look((4 if name in ("list", "reverse") else STEP // 8) * len(value))
        if name in ("list", "slice", "sort"):
            budget.make_items(len(value))
    return value


def _refuse_long_path(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Attributes are given as paths, each part of which is looked up in each item."""
    if name in _TEXT_FILTERS or name in ("batch", "slice", "select", "reject"):
        return
    paths = args[:1] if name in ("selectattr", "rejectattr") else () if name == "map" else args
    for path in (*paths, *kwargs.values()):
        if isinstance(path, str) and path.count(".") + path.count(",") > 100:
            raise jinja2.TemplateError("it asks for an attribute of more than 100 parts")


@pass_context
def _string(context: Context, value: Any) -> str:
    return value if isinstance(value, str) else _budget(context).text(value)


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    budget = _budget(context)
    separator = budget.text(d)
    if attribute is not None:
        _refuse_long_path("join", (attribute,), {})
        value = map(make_attrgetter(context.environment, attribute), value)
    if isinstance(value, Sized) and not isinstance(value, jinja2.Undefined):
        budget.make_items(len(value))
        budget.look(STEP // 16 * len(value))
    texts = [budget.text(part) for part in value]
    budget.make(sum(map(len, texts)) + len(separator) * len(texts))
    return separator.join(texts)


@pass_context
def _replace(context: Context, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    budget = _budget(context)
    text = budget.text(value)
    parts = (budget.text(old), budget.text(new))
    return string_method(budget, text.replace, parts if count is None else (*parts, count), {})  # type: ignore[no-any-return]


@pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise jinja2.TemplateError("it formats with values in order and by name")
    budget = _budget(context)
    return printf(budget, value if isinstance(value, str) else budget.text(value), kwargs or args)


@pass_context
def _indent(context: Context, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    budget = _budget(context)
    text = value if isinstance(value, str) else budget.text(value)
    _refuse_large((width,))
    lines = 1 + sum(map(text.count, _LINE_ENDS))
    budget.look(len(text))
    budget.make_items(lines)
    budget.make(len(text) + (lines + 1) * (len(width) if isinstance(width, str) else width))
    return jinja2.filters.do_indent(text, width, first, blank)


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    budget = _budget(context)
    budget.json_fits(value, indent, separators)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    budget.make(len(text))
    return text


def _joinable(budget: Budget, args: tuple[Any, ...], separator: int, most: int) -> Iterable[Any]:
    (parts,) = args
    if isinstance(parts, str):
        budget.make_items(len(parts))
        budget.make(len(parts) * (1 + separator))
        return parts
    parts = list(parts)
    budget.look(STEP // 16 * len(parts))
    budget.has_room(most * sum(len(part) + separator for part in parts if isinstance(part, str)) // 3)
    return parts


def _replaces(budget: Budget, most: int, text: str, old: Any = "", new: Any = "", count: int = -1) -> None:
    times = text.count(old)
    if count >= 0:
        times = min(times, count)
    budget.has_room(most * (len(text) + times * len(new)) // 3)


def _parts(budget: Budget, parts: list[str]) -> list[str]:
    budget.make_items(len(parts))
    budget.make(OBJECT * len(parts))
    budget.make(sum(map(len, parts)))
    return parts


def _refuse_others(operator: str, left: object, right: object) -> None:
    raise TypeError(f"{operator} wants numbers, not {type(left).__name__!r} and {type(right).__name__!r}")


def _refuse_large(numbers: Iterable[Any]) -> None:
    for number in numbers:
        if isinstance(number, int) and abs(number) > MOST_NUMBER:
            raise jinja2.TemplateError(f"it asks for a width or count above {MOST_NUMBER}")


def _refuse_wide(text: str) -> None:
    if len(text) > MOST_NUMBER:
        raise jinja2.TemplateError(f"its format is longer than {MOST_NUMBER}")
    if _LONG_NUMBER.search(text):
        raise jinja2.TemplateError("it formats with a width of six digits or more")
