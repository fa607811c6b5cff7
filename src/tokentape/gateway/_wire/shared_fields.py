"""Fields of requests and replies that several wire APIs share: sampling, tool choices, schemas, logprobs, usage."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from tokentape._session.matching import reasoning_of
from tokentape.chat._call_constraint import CallRule
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import EngineInfo, SampleDelta, SamplingParams
from tokentape.engines._checks import unsupported
from tokentape.errors import InvalidRequest, UnsupportedParameter
from tokentape.gateway._dialect import Dialect, DoneChoice, Encoder, RequestContext
from tokentape.gateway._events import TurnDone, TurnStarted
from tokentape.gateway._http import check_depth, encode_event, encode_json, param_of, read_as
from tokentape.gateway._pins import MinP, Penalty, RepetitionPenalty, Seed, Stop, Temperature, TopK, TopP
from tokentape.types import TokenIds, Turn

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=20)]

_HEADER_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TYPE_NAME = re.compile("[a-z0-9_]{1,64}")
_MOST_NAMED = 16
_UNCHANGED = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed")
_SCHEDULING = ("priority", "cache_salt")

TEXT_PARTS = ("text", "input_text", "output_text")
"""The types of parts with text in all APIs."""

HINTS = frozenset(
    {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier"}
)
"""Fields of chat and Responses for OpenAI's servers. They have no effect on sampling."""

_BodyKind = TypeVar("_BodyKind", bound=Struct)
_Choices = TypeVar("_Choices", bound="ChoicesBody")


class SamplingFields(Struct, kw_only=True):
    """Sampling fields of OpenAI and vLLM with the same name in all APIs."""

    model: str = ""
    stream: bool = False
    return_token_ids: bool = False
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    seed: Seed | None = None
    stop: Stop = []
    stop_token_ids: list[TokenId] = []
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    session_id: str | None = None


class StreamOptions(Struct):
    include_usage: bool | None = False


class ChoicesBody(SamplingFields, kw_only=True):
    """The fields that chat completions and completions share."""

    n: Annotated[int, Meta(ge=1, le=16)] = 1
    min_tokens: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    stream_options: StreamOptions | None = None
    response_format: Any = None
    logit_bias: Any = None


class ChoicesEncoder(Encoder[_Choices]):
    """Writes the replies of chat completions and completions. Each chunk of a stream belongs to one choice."""

    _id: str
    _whole: str
    _chunks: str

    def __init__(self, dialect: Dialect, body: _Choices, ignored: Sequence[str], started: TurnStarted) -> None:
        super().__init__(dialect, body, ignored, started)
        self._head: dict[str, Any] = {
            "id": f"{self._id}-{started.reply_id}",
            "created": int(started.created_at),
            "model": dialect.model_id,
        }

    def whole(self, choices: Sequence[DoneChoice]) -> dict[str, Any]:
        encoded = [self._choice(choice) for choice in choices]
        counts = usage(self._prompt_ids, [choice.done for choice in choices], self._tokenizer)
        return {**self._head, "object": self._whole, "choices": encoded, "usage": counts}

    def end(self, done: Sequence[TurnDone]) -> Iterator[bytes]:
        yield from map(self._finish, done)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            counts = usage(self._prompt_ids, done, self._tokenizer)
            yield encode_event({**self._head, "object": self._chunks, "choices": [], "usage": counts})
        yield b"data: [DONE]\n\n"

    def _prompt_fields(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt_ids.tolist()} if self._body.return_token_ids else {}

    def _choice(self, choice: DoneChoice) -> dict[str, Any]:
        raise NotImplementedError

    def _finish(self, done: TurnDone) -> bytes:
        """Return the last chunk of a choice."""
        raise NotImplementedError

    def _chunk(self, choice: Mapping[str, Any], **more: Any) -> bytes:
        return encode_event({**self._head, "object": self._chunks, **more, "choices": [choice]})


def sampling_params(
    body: SamplingFields,
    context: RequestContext,
    names: Mapping[str, str],
    max_tokens: int,
    top_logprobs: int,
    **more: Any,
) -> SamplingParams:
    """Return the sampling parameters of a body, with `more` parameters that not all APIs have.

    Raises `InvalidRequest` for a stop id outside the vocabulary, and the error of `refuse_unsupported`.
    """
    known_ids(body.stop_token_ids, context.vocab_size, "stop_token_ids")
    sampling = SamplingParams(
        max_tokens=max_tokens,
        top_k=max(body.top_k, 0),
        stop_token_ids=tuple(body.stop_token_ids),
        stop_strings=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        top_logprobs=top_logprobs,
        **{name: getattr(body, name) for name in _UNCHANGED},
        **{name: getattr(body, name) for name in _SCHEDULING if name in context.engine.sampling},
        **more,
    )
    refuse_unsupported(sampling, context.engine, names)
    return sampling


def known_ids(ids: Sequence[int], vocab_size: int, param: str) -> TokenIds:
    """Return `ids` as an array. Raises `InvalidRequest` for `param` if an id is outside the vocabulary."""
    array = np.array(ids, dtype=np.int32)
    if len(array) and array.max() >= vocab_size:
        index = int(np.argmax(array >= vocab_size))
        raise InvalidRequest(
            f"{param}[{index}] is {array[index]}, which is not in the vocabulary; expected 0 to {vocab_size - 1}", param
        )
    return array


def ignored_fields(body: SamplingFields, context: RequestContext, model_id: str) -> list[str]:
    """Return the fields that are set but have no effect: scheduler and cache fields, `model`, another session's id."""
    unsent = [name for name in _SCHEDULING if getattr(body, name) and name not in context.engine.sampling]
    other_session = ["session_id"] if body.session_id not in (None, context.session_id) else []
    return [*ignored_model(body.model, context.engine, model_id), *unsent, *other_session]


def ignored_model(model: str, engine: EngineInfo, model_id: str) -> list[str]:
    """Return `["model"]` if a request names a different model and the engine has adapters, since it may mean one."""
    return ["model"] if "adapter" in engine.sampling and model not in ("", model_id) else []


def read_fields(
    body: Any, kind: type[_BodyKind], ignored: frozenset[str], required: str
) -> tuple[_BodyKind, dict[str, Any]]:
    """Decode a body to the Struct `kind`. Return it, and the body without fields that are null, which count as missing.

    Raises `InvalidRequest`, and `UnsupportedParameter` for a field that is neither in `kind` nor in `ignored`.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    for name in fields:
        if name not in kind.__struct_encode_fields__ and name not in ignored:
            near = difflib.get_close_matches(name[:64], kind.__struct_encode_fields__, 1, cutoff=0.8)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise UnsupportedParameter(f"parameter {name[:64]!r} is not supported{meant}", name[:64])
    if required not in fields:
        raise InvalidRequest(f"{required} is missing", required)
    return read_as(fields, kind), fields


def refuse_unserved(served: Mapping[str, tuple[bool, str]]) -> None:
    """Raise `UnsupportedParameter` for the first parameter with an unsupported value.

    `served` maps parameters to whether their value is supported, and a description of the supported values.
    """
    for name, (is_served, what) in served.items():
        if not is_served:
            raise UnsupportedParameter(f"this value of {name} is not supported; expected {what}", name)


def shown_type(kind: Any) -> str:
    """Describe the type of a part, item or tool for an error. Quotes only text that could be the name of a type."""
    if isinstance(kind, str) and _TYPE_NAME.fullmatch(kind):
        return f"type {kind!r}"
    return "no type" if kind is None else "an unknown type"


def refuse_part(part: Any, where: str, takes_images: bool = False) -> NoReturn:
    """Raise `InvalidRequest` for a text part without text, and `UnsupportedParameter` for a part of another type.

    `part` has the fields `type` and `text`. `where` is its path in the body.
    """
    if part.type in TEXT_PARTS and part.text is None:
        raise InvalidRequest(f"{where}.text is missing; send a string", param_of(where))
    expected = "text or an image" if takes_images else "text only"
    raise UnsupportedParameter(
        f"{where} has {shown_type(part.type)}; expected {expected}: remove this part, or send text instead",
        param_of(where),
    )


def refuse_unknown_tools(names: Iterable[Any], tools: Collection[str]) -> None:
    """Raise `InvalidRequest` if `tool_choice` needs tools and there are none, or if `tools` lacks one of `names`."""
    if not tools or any(name not in tools for name in names):
        problem = "names no tool, or one that is not in tools" if tools else "requires a tool, but tools is empty"
        raise InvalidRequest(f"tool_choice {problem}; send the tool in tools, or choose one of tools", "tool_choice")


def forced_tools(choice: Any, tools: Sequence[str], *, named_only: bool = False) -> tuple[str, ...]:
    """Return the tools of which `tool_choice`, of chat or Responses, forces a call; empty if a call is not forced.

    Raises `UnsupportedParameter` for an unsupported choice, and `InvalidRequest` for one that needs a missing tool.
    `tools` are the names of the functions. With `named_only`, only a choice that names a function needs one.
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    served = '"auto", "none", "required", {"type": "function", ...} or {"type": "allowed_tools", ...}'
    refuse_unserved({"tool_choice": (kind in ("auto", "none", "required", "function", "allowed_tools"), served)})
    if kind in ("auto", "none"):
        return ()
    entries: Any = [choice]
    # In chat the fields are one level deeper.
    inner = choice.get(kind, choice) if isinstance(choice, dict) else None
    allowed = inner if kind == "allowed_tools" and isinstance(inner, dict) else {}
    if kind == "allowed_tools" and isinstance(choice, dict):
        listed = allowed.get("tools")
        entries = listed if isinstance(listed, list) and listed else [{"type": "function"}]
    entries = [entry for entry in entries if isinstance(entry, dict)]
    functions = [entry.get("function", entry) for entry in entries]
    names = [function.get("name") if isinstance(function, dict) else None for function in functions]
    needed = [name for entry, name in zip(entries, names, strict=True) if entry.get("type") == "function"]
    if needed or not named_only:
        refuse_unknown_tools(needed, tools)
    if kind == "required":
        return tuple(tools)
    forces = kind == "function" or allowed.get("mode") == "required"
    return tuple(name for name in tools if forces and name in names)


def json_schema(form: Any, where: str, context: RequestContext, tools: Collection[Any] = ()) -> str | None:
    """Return the JSON Schema that the reply must follow, as JSON text; None for plain text. `where` is the form's path.

    Raises `InvalidRequest`, and `UnsupportedParameter` if the engine can't enforce it or the request has tools.
    """
    kind = form.get("type") if isinstance(form, dict) else form
    param = param_of(where)
    if form in (None, {}) or kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        shown_kind = shown_type(kind if isinstance(form, dict) else None)
        raise UnsupportedParameter(f"{where} has {shown_kind}; expected text, json_object or json_schema", param)
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        # In chat the fields are one level deeper.
        inner = form.get("json_schema", form) if isinstance(form, dict) else None
        schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where} has no schema; expected a JSON Schema, an object", param)
    check_depth(schema, where)
    instead = "ask for a function call with the schema as its parameters"
    if "json_schema" not in context.engine.sampling:
        raise UnsupportedParameter(
            f"{where}: the engine {context.engine.name!r} can't follow a schema; {instead}, or use vLLM, SGLang, "
            "llama.cpp, or the embedded engine with tokentape[grammar]",
            param,
        )
    if tools:
        raise UnsupportedParameter(f"{where} can't be combined with tools; send one or the other", param)
    return encode_json(schema).decode()


def refuse_prefill(param: str) -> None:
    """Raise `UnsupportedParameter` for a request to continue an assistant message."""
    raise UnsupportedParameter(
        "beginning the reply for the model (prefill) is not supported; send the prompt's token ids, the beginning "
        "included, to /v1/completions, or ask for the beginning in a user message",
        param,
    )


def entries(name: str, objects: Iterable[Any]) -> list[Any]:
    """Return the entries of the lists in the objects' field `name`. Entries that are not objects are left out."""
    lists = [entry.get(name) for entry in objects if isinstance(entry, dict)]
    return [entry for items in lists if isinstance(items, list) for entry in items if isinstance(entry, dict)]


def unknown_fields(where: str, objects: Sequence[Any], known: frozenset[str]) -> tuple[str, ...]:
    """Return `where.name` for each field of the objects that has a value and isn't `known`, sorted."""
    names = {name for entry in objects if isinstance(entry, dict) for name, value in entry.items() if value}
    return header_safe(where, names - known)


def header_safe(where: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return `where.name` for the first of the sorted names, without those that can't be in a header."""
    safe = sorted(name for name in names if _HEADER_SAFE.fullmatch(name))
    return tuple([f"{where}.{name}" for name in safe[:_MOST_NAMED]])


def tool_arguments(arguments: str | dict[str, Any], where: str) -> str | dict[str, Any]:
    """Parse a tool call's arguments if they are a JSON object: templates print objects, and would quote a string.

    Return other text unchanged, and text that is nested too deeply, which a model may sample and clients then send
    back. Raises `InvalidRequest` if the arguments, at the path `where`, are an object that is nested too deeply.
    """
    try:
        value = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
        if isinstance(value, dict | list):
            check_depth(value, where)
    except (ValueError, RecursionError):
        if isinstance(arguments, str):
            return arguments
        raise
    return value if isinstance(value, dict) else arguments


def logprob_entries(
    tokenizer: Tokenizer, sampled: Sequence[SampleDelta], *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """Return a logprob entry per sampled token, with its alternatives, in the format of chat and Responses."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        name = f"token_id:{token_id}" if as_ids else data.decode("utf-8", "replace")
        return {"token": name, "logprob": logprob, "bytes": list(data)}

    return [
        {
            **token(token_id, logprob),
            "top_logprobs": [token(*pair) for pair in (delta.top_logprobs[index] if delta.top_logprobs else ())],
        }
        for delta in sampled
        for index, (token_id, logprob) in enumerate(zip(delta.token_ids, delta.logprobs, strict=True))
    ]


def usage(prompt_ids: TokenIds, choices: Sequence[TurnDone], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a call's token counts. Cached tokens are included only if the engine reports them for all choices."""
    completion = sum([len(done.turn.completion_ids) for done in choices])
    counts: dict[str, Any] = {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": completion,
        "total_tokens": len(prompt_ids) + completion,
    }
    cached = [done.cached_tokens for done in choices if done.cached_tokens is not None]
    if cached and len(cached) == len(choices):
        counts["prompt_tokens_details"] = {"cached_tokens": min(cached)}
    if any(reasoning_of(done.turn.reply) for done in choices):
        thought = sum(reasoning_tokens(done.turn, tokenizer) for done in choices)
        counts["completion_tokens_details"] = {"reasoning_tokens": thought}
    return counts


def reasoning_tokens(turn: Turn, tokenizer: Tokenizer) -> int:
    """Count the sampled tokens of a reply's reasoning, at its first occurrence; 0 if it is not contiguous."""
    reasoning = reasoning_of(turn.reply).encode("utf-8", "surrogatepass")
    if not reasoning:
        return 0
    spelled = [tokenizer.token_bytes(token_id) for token_id in turn.completion_ids.tolist()]
    begin = b"".join(spelled).find(reasoning)
    if begin < 0:
        return 0
    ends = list(accumulate(map(len, spelled)))
    # From the token with the first byte to the token with the last byte.
    return bisect_left(ends, begin + len(reasoning)) - bisect_right(ends, begin) + 1


def refuse_unsupported(sampling: SamplingParams, engine: EngineInfo, names: Mapping[str, str]) -> None:
    """Raise `UnsupportedParameter` if a set parameter would be ignored by the engine.

    `names` maps fields of `SamplingParams` to their names in the API, where these differ.
    """
    if (unsupported_field := unsupported(sampling, engine)) is not None:
        name = names.get(unsupported_field, unsupported_field)
        raise UnsupportedParameter(f"the engine {engine.name!r} does not support {name}", name)


def call_rule(
    context: RequestContext, choice: Any, forced: Sequence[str], strict: Collection[str], *, parallel: bool = True
) -> CallRule | None:
    """Return the constraint on a reply's tool calls; None if there is none, or if the gateway only reports it.

    `choice` is the request's `tool_choice` if it has an effect, else None. `forced` are the tools that it forces a call
    of, `strict` the strict tools. Raises `UnsupportedParameter` if the gateway should enforce the constraint but can't.
    """
    if not context.enforces_tools or (choice is None and not strict):
        return None
    if choice is not None and not forced:
        raise UnsupportedParameter(
            "this tool_choice can't be enforced; omit it, and send only the tools that may be called", "tool_choice"
        )
    if "structural_tag" not in context.engine.sampling:
        raise UnsupportedParameter(
            f"the engine {context.engine.name!r} can't enforce tool calls; omit `strict` and ask for the tool call in "
            "a message, or use vLLM, SGLang, or the embedded engine with tokentape[grammar]",
            "tools" if choice is None else "tool_choice",
        )
    return CallRule(tuple(forced), frozenset(strict), parallel)


def unenforced(choice: Any, parallel: bool, rule: CallRule | None) -> list[str]:
    """Return the parameters about tool calls that have an effect but that `rule` does not enforce."""
    names = ["tool_choice"] if choice is not None and rule is None else []
    return names if parallel or (rule is not None and rule.required) else [*names, "parallel_tool_calls"]
