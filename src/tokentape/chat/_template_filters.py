"""Filters and tests for chat templates within the limits of `_limits.py`, and checks of arguments shared with methods.

A filter counts the values that it reads and makes. If it multiplies, or takes more than linear time, it checks the
sizes of its arguments first.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import wraps
from itertools import islice
from typing import Any

import jinja2
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.utils import pass_context

from tokentape.chat._limits import ESCAPED, MOST_ITEMS, MOST_NUMBER, Usage, usage

_UNUSED_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_FREE_FILTERS = ("attr", "count", "d", "default", "first", "items", "last", "length")
_TEXT_FILTERS = (
    *("capitalize", "center", "e", "escape", "forceescape", "lower", "safe", "string", "title", "trim", "truncate"),
    *("upper", "urlencode"),
)
_WHOLE = ("filesizeformat", "float", "int", "reverse")
"""Filters that do not make a list of the characters of a text."""
_BY_KEY = ("groupby", "sort", "unique")
"""Filters that keep a key of each item, a copy if it is text."""
_IN_PIECES = ("title", "urlencode")
"""Filters that make a list of the words or characters of a text."""
_WITH_WIDTHS = frozenset({"batch", "center", "expandtabs", "ljust", "rjust", "round", "slice", "zfill"})
"""Filters and methods that a number makes long, or slow."""
_NOT_FROM_THE_START = ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim")
"""Methods and filters that look for each character, or at each place, of what they are given."""
_MOST_COMPARISONS = 2**30
_ESCAPED_UNICODE = 6
"""The same for JSON that keeps what is not ASCII."""
_MOST_IN_PIECES = 2**22
_MOST_PARTS_OF_A_PATH = 10
_NUMBERS = re.compile(r"\d+")
_PRINTF = re.compile(r"%(?:\([^()]*\))?[-#0 +]*(\*|[0-9]*)(?:\.(\*|[0-9]*))?[hlL]?(.)", re.DOTALL)
"""A conversion of `%` with its width, precision and kind."""
_STRFTIME_WIDTH = re.compile(r"%[-_0^#+]*(\d+)")
_WORD = re.compile(r"\w+")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def limited_filters(unlimited: jinja2.Environment) -> dict[str, Any]:
    """Return the filters of templates by name: Jinja's with limits, or our own in their place."""
    limited: dict[str, Any] = {
        name: function if name in _FREE_FILTERS else _limited_filter(name, unlimited)
        for name, function in unlimited.filters.items()
        if name not in _UNUSED_FILTERS
    }
    own = {"format": _format, "indent": _indent, "join": _join, "replace": _replace, "tojson": _tojson}
    return {**limited, **own, "sum": _sum(limited["sum"]), "wordcount": _wordcount}


def limited_tests(tests: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tests of templates by name, those that look at more than a type limited."""
    limited = {}
    for name, test in tests.items():
        if name in ("odd", "even", "divisibleby"):
            limited[name] = _number_test(test)
        elif name in ("in", "lower", "upper") or test.__module__ == "_operator":
            limited[name] = _limited_test(test)
    return {**tests, **limited}


def _limited_filter(name: str, unlimited: jinja2.Environment) -> Callable[..., Any]:
    @pass_context
    @wraps(unlimited.filters[name], assigned=("__name__", "__doc__"), updated=())
    def limited(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        use = usage()
        weight, longest = use.weigh(value), 0
        if args or kwargs:
            given = (*args, *kwargs.values())
            if name in _WITH_WIDTHS:
                use.numbers(given)
            longest = use.weigh(given)
            if name == "trim":
                _refuse_comparisons((1 if isinstance(value, str) else ESCAPED) * weight, longest)
            weight += longest
            _refuse_long_paths(given)
        if name in _IN_PIECES and weight > _MOST_IN_PIECES:
            raise jinja2.TemplateError(f"it makes pieces of a text longer than {_MOST_IN_PIECES}")
        if name in _TEXT_FILTERS:
            use.fits((6 if isinstance(value, str) else ESCAPED) * weight)
        elif name not in _WHOLE or not isinstance(value, str):
            use.sized(value)
        if name in _BY_KEY:
            items = use.made(list(value))
            use.fits(longest * len(items))
            value = use.each(items)
        made = unlimited.call_filter(name, value, args, kwargs, context)
        return use.counted(made) if isinstance(made, Iterator) else use.made(made)

    return limited


def _limited_test(test: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def limited(context: Context, *values: Any) -> Any:
        for value in values:
            usage().weigh(value)
        return test(*values)

    return limited


def _number_test(test: Callable[..., Any]) -> Callable[..., Any]:
    def of_numbers(*values: Any) -> Any:
        if not all(isinstance(value, int | float) for value in values):
            refuse_others("%", *values)
        return test(*values)

    return of_numbers


def _attributes(context: Context, values: Any, path: str | int) -> Iterator[Any]:
    _refuse_long_paths([path])
    return map(make_attrgetter(context.environment, path), values)


def _refuse_long_paths(given: Iterable[Any]) -> None:
    if any(isinstance(path, str) and len(re.findall("[.,]", path)) >= _MOST_PARTS_OF_A_PATH for path in given):
        raise jinja2.TemplateError(f"it asks for an attribute of more than {_MOST_PARTS_OF_A_PATH} parts")


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    use = usage()
    if attribute is not None:
        value = _attributes(context, value, attribute)
    separator = use.text(d)
    use.sized(value)
    texts = [use.text(part) for part in value]
    use.room(sum(map(len, texts)) + len(separator) * len(texts))
    return use.made(separator.join(texts))  # type: ignore[no-any-return]


@pass_context
def _replace(context: Context, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    use = usage()
    text, parts = use.text(value), (use.text(old), use.text(new), -1 if count is None else count)
    return use.made(text.replace(*string_arguments(text, "replace", parts, {})))  # type: ignore[no-any-return]


@pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise jinja2.TemplateError("it formats with values in order and by name")
    return printf(usage().text(value), kwargs or args)


@pass_context
def _indent(context: Context, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    use = usage()
    text = use.text(value)
    use.numbers((width,))
    use.items(sum(map(text.count, _LINE_ENDS)))
    each = len(width) if isinstance(width, str) else width
    use.room(len(text) + (2 + sum(map(text.count, _LINE_ENDS))) * each)
    return use.made(jinja2.filters.do_indent(text, width, first, blank))  # type: ignore[no-any-return]


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    use = usage()
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    each = (ESCAPED if ensure_ascii else _ESCAPED_UNICODE) + sum(map(len, separators or ()))
    use.fits(each * use.weigh(value))
    if indent is None:
        return use.made(encoder.encode(value))  # type: ignore[no-any-return]
    pieces, size = [], 0
    for piece in use.each(encoder.iterencode(value)):
        size += len(piece)
        use.room(size)
        pieces.append(piece)
    return use.made("".join(pieces))  # type: ignore[no-any-return]


def _sum(of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def limited(context: Context, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        if isinstance(start, int | float | str):
            return of_numbers(context, value, attribute, start)
        for one in value if attribute is None else _attributes(context, value, attribute):
            start = context.environment.call_binop(context, "+", start, one)  # type: ignore[attr-defined]
        return start

    return limited


@pass_context
def _wordcount(context: Context, value: Any) -> int:
    return sum(1 for _ in usage().each(_WORD.finditer(usage().text(value))))


def printf(text: str, values: Any) -> str:
    use = usage()
    found = _PRINTF.findall(text)
    widths = [number for width, precision, _ in found for number in (width, precision)]
    kinds = {kind for *_, kind in found}
    if "(" in kinds:
        raise jinja2.TemplateError("it formats with a key that has parentheses")
    if "*" in widths:
        use.numbers(values if isinstance(values, tuple) else (values,))
    if isinstance(values, Mapping):
        written = len(found) * ESCAPED * use.weigh(values)
    else:
        written = sum(_written(one, kinds) for one in (values if isinstance(values, tuple) else (values,)))
    use.fits(len(text) + _sum_of_widths(widths) + written)
    return use.made(text % values)  # type: ignore[no-any-return]


def _written(value: Any, kinds: Collection[str]) -> int:
    """Return how long a value can become in a format with these kinds of conversions."""
    return usage().weigh(value) * (1 if type(value) is str and not {"r", "a"}.intersection(kinds) else ESCAPED)


def _sum_of_widths(widths: list[str]) -> int:
    if any(len(width) > 5 for width in widths):
        raise jinja2.TemplateError("it formats with a width of six digits or more")
    return sum(MOST_NUMBER if width == "*" else int(width or 0) for width in widths)


def string_arguments(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments to give to a method of a string. Refuse those that make it huge, or never end."""
    use = usage()
    given = (*args, *kwargs.values())
    if name in _WITH_WIDTHS:
        use.numbers(given)
    if name == "join":
        args = (list(islice(args[0], MOST_ITEMS + 1)),)
        use.made(args[0])
        use.fits(6 * (use.weigh(args[0]) + len(text) * len(args[0])))
    elif name in ("format", "format_map"):
        _refuse_format(use, text, given)
    elif name in ("split", "rsplit") and len(args) < 2 and "maxsplit" not in kwargs:
        kwargs["maxsplit"] = MOST_ITEMS
    elif name == "splitlines":
        use.items(sum(map(text.count, _LINE_ENDS)))
    elif name == "replace":
        old, new, count = (*args, -1)[:3]
        times = text.count(old)
        use.fits(2 * (len(text) + (times if count < 0 else min(times, count)) * len(new)))
    elif name == "expandtabs":
        use.fits(len(text) + text.count("\t") * max([8, *(one for one in given if isinstance(one, int))]))
    longest = max(map(use.weigh, given), default=0)
    if name in _NOT_FROM_THE_START:
        _refuse_comparisons(len(text), longest)
    use.fits(6 * (len(text) + longest))
    return args


def _refuse_comparisons(length: int, sought: int) -> None:
    if length * sought > _MOST_COMPARISONS:
        raise jinja2.TemplateError("it looks for too long a text")


def _refuse_format(use: Usage, text: str, values: tuple[Any, ...]) -> None:
    fields = [one for one in string.Formatter().parse(text) if one[1] is not None]
    if any("{" in (spec or "") or not re.fullmatch(r"\w*", field or "") for _, field, spec, _ in fields):
        raise jinja2.TemplateError("it formats with a width that is given, or with a part of a value")
    widths = [number for _, _, spec, _ in fields for number in _NUMBERS.findall(spec or "")]
    kinds = {kind for *_, kind in fields if kind}
    given = [one for value in values for one in (value.values() if isinstance(value, Mapping) else (value,))]
    written = len(fields) * max((_written(one, kinds) for one in given), default=0)
    use.fits(len(text) + _sum_of_widths(widths) + written)


def refuse_others(operator: str, left: object, right: object = 0) -> None:
    raise TypeError(f"{operator} wants numbers, not {type(left).__name__!r} and {type(right).__name__!r}")


def refuse_wide_times(text: str) -> None:
    """Refuse a format of a date that would be long."""
    if len(text) > MOST_NUMBER:
        raise jinja2.TemplateError(f"its format of a date is longer than {MOST_NUMBER}")
    usage().fits(ESCAPED * ESCAPED * len(text) + _sum_of_widths(_STRFTIME_WIDTH.findall(text)))
