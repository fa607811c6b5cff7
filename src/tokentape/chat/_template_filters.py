"""Limit the filters, tests and string methods that chat templates can use (see `_limits.py`).

A call is refused if `GROWTH` times the size of its arguments exceeds the limit. The arguments of filters and methods
that multiply sizes or take more than linear time are also checked.
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

from tokentape.chat._limits import GROWTH, MOST_ITEMS, MOST_NUMBER, usage

_UNUSED_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_FREE_FILTERS = ("attr", "count", "d", "default", "first", "items", "last", "length")
_OF_TEXTS = (
    *("capitalize", "center", "e", "escape", "filesizeformat", "float", "forceescape", "indent", "int", "lower"),
    *("reverse", "safe", "string", "title", "trim", "truncate", "upper", "urlencode", "wordcount"),
)
"""Filters that read a string without creating a list of its characters."""
_COLLECTING = ("groupby", "join", "sort", "unique")
"""Filters that store a text or key for each item; the key may come from an argument."""
_IN_PIECES = ("title", "urlencode")
"""Slow filters that create a list of a text's words or characters."""
_WITH_WIDTHS = frozenset({"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "zfill"})
"""Filters and methods with a numeric argument that can make them slow or their result long."""
_NOT_FROM_THE_START = ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim")
"""Methods and filters whose time is proportional to the text's length times the argument's length."""
_MOST_COMPARISONS = 2**30
_MOST_PARTS_OF_A_PATH = 10
_ESCAPING = ("e", "escape", "forceescape")
_NUMBERS = re.compile(r"\d+")
_PRINTF = re.compile(r"%(?:\([^()]*\))?[-#0 +]*(\*|[0-9]*)(?:\.(\*|[0-9]*))?[hlL]?(.)", re.DOTALL)
"""Matches a conversion for the `%` operator. The groups are width, precision and kind."""
_STRFTIME_WIDTH = re.compile(r"%[-_0^#+]*(\d+)")


def limited_filters(unlimited: jinja2.Environment) -> dict[str, Any]:
    """Return the filters for templates by name: Jinja's filters with limits, and some replacements."""
    limited: dict[str, Any] = {
        name: function if name in _FREE_FILTERS else _limited_filter(name, unlimited)
        for name, function in unlimited.filters.items()
        if name not in _UNUSED_FILTERS
    }
    own = {"format": _format, "replace": _replace, "tojson": _tojson}
    return {**limited, **own, "sum": _sum(limited["sum"])}


def limited_tests(tests: Mapping[str, Any]) -> dict[str, Any]:
    """Return Jinja's tests (`x is odd`) by name. One that reads more than a value's type counts as a step."""

    def limited(test: Callable[..., Any], *, of_numbers: bool) -> Callable[..., Any]:
        def limited_test(*values: Any) -> Any:
            if of_numbers and not all(isinstance(value, int | float) for value in values):
                refuse_others("%", *values)
            usage().tick()
            return test(*values)

        return limited_test

    numeric = ("odd", "even", "divisibleby")
    return {
        name: limited(test, of_numbers=name in numeric)
        if name in (*numeric, "in", "lower", "upper") or test.__module__ == "_operator"
        else test
        for name, test in tests.items()
    }


def _limited_filter(name: str, unlimited: jinja2.Environment) -> Callable[..., Any]:
    @pass_context
    @wraps(unlimited.filters[name], assigned=("__name__", "__doc__"), updated=())
    def limited(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        use = usage()
        arguments = (*args, *kwargs.values())
        refuse_large(name, value, arguments)
        if not isinstance(value, str) or name not in _OF_TEXTS:
            use.sized(value)
        if name in _COLLECTING:
            value = use.made(list(value))
            use.fits(use.weigh(arguments) * len(value))
        refuse_large(name, value, arguments)
        _refuse_long_paths(arguments)
        if name in _ESCAPING and type(value) is str:
            value = value.translate({code: char for code, char in use.escapes.characters.items() if char in "&<>'\""})
        if name == "indent":
            width = args[0] if args else kwargs.get("width", 4)
            use.fits((2 + len(use.text(value).splitlines())) * (len(width) if isinstance(width, str) else width))
        elif name in _COLLECTING:
            value = use.counted(value)
        result = unlimited.call_filter(name, value, args, kwargs, context)
        return use.counted(result) if isinstance(result, Iterator) else use.made(result)

    return limited


def _attributes(context: Context, values: Any, path: str | int) -> Iterator[Any]:
    _refuse_long_paths([path])
    return map(make_attrgetter(context.environment, path), values)


def _refuse_long_paths(arguments: Iterable[Any]) -> None:
    if any(isinstance(path, str) and len(re.findall("[.,]", path)) >= _MOST_PARTS_OF_A_PATH for path in arguments):
        raise jinja2.TemplateError(f"it asks for an attribute path with more than {_MOST_PARTS_OF_A_PATH} parts")


@pass_context
def _replace(context: Context, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    use = usage()
    text, parts = use.text(value), (use.text(old), use.text(new), -1 if count is None else count)
    return use.made(replaced(text, *string_arguments(text, "replace", parts, {})))  # type: ignore[no-any-return]


def replaced(text: str, old: str, new: str, count: int = -1) -> str:
    """Return `text.replace(old, new, count)`, where characters that were escaped in a caller's text also match `old`.

    Escaped characters that are not replaced stay escaped. Removing text creates no control token from what is around
    it, such as `<|im_end|>` from `<|im_<b>end|>`.
    """
    escapes = usage().escapes
    seen = text.translate(escapes.characters)
    if not old or old not in seen:
        return text.replace(old, new, count)
    pieces, start = [], 0
    while count and (position := seen.find(old, start)) >= 0:
        pieces.append(text[start:position])
        start = position + len(old)
        count -= 1
    pieces.append(text[start:])
    return new.join(pieces) if new else escapes.join(pieces)


@pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise jinja2.TemplateError("it formats with both positional and named values")
    return printf(usage().text(value), kwargs or args)


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
    use.numbers((len(indent) if isinstance(indent, str) else indent,))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    use.fits((GROWTH + sum(map(len, separators or ()))) * use.weigh(value))
    if indent is None:
        return use.made(encoder.encode(value))  # type: ignore[no-any-return]
    pieces, size = [], 0
    for piece in use.counted(encoder.iterencode(value)):
        size += len(piece)
        use.room(size)
        pieces.append(piece)
    return use.made("".join(pieces))  # type: ignore[no-any-return]


def _sum(of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def limited(context: Context, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        if isinstance(start, int | float | str):
            return of_numbers(context, value, attribute, start)
        for item in value if attribute is None else _attributes(context, value, attribute):
            start = context.environment.call_binop(context, "+", start, item)  # type: ignore[attr-defined]
        return start

    return limited


def refuse_large(name: str, value: Any, arguments: tuple[Any, ...]) -> None:
    """Refuse a filter or method if `value` or its `arguments` would make the result too large or too slow."""
    use = usage()
    weight, sizes = use.weigh(value), [use.weigh(argument) for argument in arguments]
    use.fits((2 if name in _IN_PIECES else 1) * GROWTH * (weight + sum(sizes)))
    if name in _WITH_WIDTHS:
        use.numbers(arguments)
    if name in _NOT_FROM_THE_START and weight * max(sizes, default=0) > _MOST_COMPARISONS:
        raise jinja2.TemplateError("it searches a long text for another long text")


def string_arguments(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments for a string method. Refuse endless ones and those that make the result too large."""
    use = usage()
    if name == "join":
        args = (use.made(list(islice(args[0], MOST_ITEMS + 1))),)
        use.fits(len(text) * len(args[0]))
    arguments = (*args, *kwargs.values())
    if name in ("format", "format_map"):
        _refuse_format(text, arguments)
        return args
    refuse_large(name, text, arguments)
    if name == "replace":
        old, new, count = (*args, -1)[:3]
        times = text.translate(use.escapes.characters).count(old)
        use.fits((times if count < 0 else min(times, count)) * len(new))
    elif name == "expandtabs":
        use.fits(text.count("\t") * max([8, *(argument for argument in arguments if isinstance(argument, int))]))
    return args


def printf(text: str, values: Any) -> str:
    """Return `text % values`, or refuse it if it would be too large."""
    use = usage()
    use.items(text.count("%"))
    specs = _PRINTF.findall(text)
    kinds = {kind for *_, kind in specs}
    if "(" in kinds:
        raise jinja2.TemplateError("it formats with a key that has parentheses")
    arguments = values if isinstance(values, tuple) else (values,)
    if any("*" in spec[:2] for spec in specs):
        use.numbers(arguments)
    # Only a mapping's values can be written more than once.
    size = (len(specs) if isinstance(values, Mapping) else 1) * sum(_written(argument, kinds) for argument in arguments)
    _refuse_formatted([width for *widths, _ in specs for width in widths if width], size)
    return use.made(text % values)  # type: ignore[no-any-return]


def _refuse_format(text: str, values: tuple[Any, ...]) -> None:
    usage().items(text.count("{"))
    fields = [field for field in string.Formatter().parse(text) if field[1] is not None]
    if any("{" in (spec or "") or not re.fullmatch(r"\w*", field or "") for _, field, spec, _ in fields):
        raise jinja2.TemplateError(
            "its string format takes a width from an argument (`{:{}}`) or writes a part of a value (`{0.x}`, `{0[x]}`)"
        )
    kinds = {kind for *_, kind in fields if kind}
    size = len(fields) * max((_written(value, kinds) for value in values), default=0)
    _refuse_formatted([n for *_, spec, _ in fields for n in _NUMBERS.findall(spec or "")], size)


def _written(value: Any, kinds: Collection[str]) -> int:
    """Return an upper bound of a value's length when it is formatted with these kinds of conversions."""
    return usage().weigh(value) * (1 if type(value) is str and not {"r", "a"}.intersection(kinds) else GROWTH)


def _refuse_formatted(widths: list[str], size: int) -> None:
    """Refuse a format if values with `size` characters in total, and the maximum for each width, are too long."""
    if any(len(width) > 5 for width in widths):
        raise jinja2.TemplateError("it formats with a width that has more than five digits")
    usage().fits(len(widths) * MOST_NUMBER + size)


def refuse_others(operator: str, left: object, right: object = 0) -> None:
    """Raise the `TypeError` for an operator whose operands are not numbers."""
    raise TypeError(f"{operator} needs numbers, not {type(left).__name__!r} and {type(right).__name__!r}")


def refuse_wide_times(text: str) -> None:
    """Refuse a `strftime` format that would create a long text."""
    if len(text) > MOST_NUMBER:
        raise jinja2.TemplateError(f"its date format is longer than {MOST_NUMBER} characters")
    _refuse_formatted(_STRFTIME_WIDTH.findall(text), GROWTH * GROWTH * len(text))
