"""Compose a chat template from a case's options.

All text is written by expressions, so that white space in the source never matters. Expressions are kept as strings of
Jinja; `say` makes output of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.generator.compose_calls import calls, result_label
from tests.generator.options import Case


@dataclass(frozen=True)
class Template:
    """A template's source, and what its tokenizer has to know of it."""

    source: str
    controls: tuple[str, ...]
    """What it writes that looks like a control token, in order of appearance."""
    bos: str
    eos: str
    other_ends: tuple[str, ...]
    """Further tokens that it ends assistant turns with."""
    kwargs: Mapping[str, bool]
    plain: tuple[str, ...] = ()
    """Tokens that are known not to be special."""


CONTROL = re.compile(r"<[|｜][^<>\s]{1,40}[|｜]>|</?[a-z_]{2,20}>|\[/?[A-Z_]{3,20}\]|\]~!?b[\[\]]|\[e~\[")
"""What looks like a control token in a template's source."""


def quoted(text: str) -> str:
    """A Jinja string."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def say(*expressions: str) -> str:
    return "{{ " + " ~ ".join(expressions) + " }}"


def write(text: str) -> str:
    return say(quoted(text)) if text else ""


_HEADERS: Mapping[str, tuple[str, str]] = {
    "chatml": ("<|im_start|>", "\n"),
    "llama": ("<|start_header_id|>", "<|end_header_id|>\n\n"),
    "role_token": ("<|", "|>\n"),
    "fullwidth": ("<｜", "｜>"),
    "text": ("### ", ":\n"),
    "model_turn": ("<start_of_turn>", "\n"),
    "inst": ("[", "] "),
}
_ENDS: Mapping[str, tuple[str, str, str]] = {
    # after messages of others, after the assistant's, after the assistant's that calls
    "token": ("<|im_end|>", "<|im_end|>", "<|im_end|>"),
    "assistant_only": ("", "<|endoftext|>", "<|endoftext|>"),
    "last_other": ("<|end|>", "<|end|>", "<|end|>"),
    "calls_other": ("<|eot_id|>", "<|eot_id|>", "<|eom_id|>"),
    "three": ("<|end|>", "<|end|>", "<|call_end|>"),
    "none": ("", "", ""),
}
ENDS = ("<|im_end|>", "<|endoftext|>", "<|end|>", "<|return|>", "<|eot_id|>", "<|eom_id|>", "<|call_end|>")
"""Every token that ends a turn in some composed template."""
_EOS = {
    "token": "<|im_end|>",
    "assistant_only": "<|endoftext|>",
    "last_other": "<|return|>",
    "three": "<|return|>",
    "calls_other": "<|eot_id|>",
    "none": "<|endoftext|>",
}
_THINK = {
    "lines": ("<think>\n", "\n</think>\n\n"),
    "tight": ("<think>", "</think>"),
    "brackets": ("[THINK]", "[/THINK]"),
}
_SHOWN = {
    "kept": "reasoning",
    "last_only": "reasoning and loop.last",
    "after_last_user": "reasoning and loop.index0 > ns.last_user",
    "always_shown": "true",
}


class _Writer:
    """Writes the parts of one template."""

    def __init__(self, case: Case) -> None:
        self.on = case.options
        self.word = quoted(case.word)
        self.separator = "\n" if self.on["separator"] == "newline" or self.on["header"] == "text" else ""
        self.think_open, self.think_close = _THINK[self.on["think_tags"]]

    def header(self, role: str, extra: str = "''", number: str = "loop.index", *, close: bool = True) -> str:
        """The header of a message; `role`, `extra` and `number` are expressions."""
        before, after = _HEADERS[self.on["header"]]
        if self.on["header"] in ("text", "fullwidth"):
            role = f"({role} | capitalize)"
        elif self.on["header"] == "inst":
            role = f"({role} | upper)"
        elif self.on["header"] == "model_turn":
            role = f"({role} | replace('assistant', 'model'))"
        written = [quoted(before), role, extra]
        if self.on["numbering"] == "messages":
            written += ["' #'", number]
        elif self.on["numbering"] == "user_turns":
            written += ["' #'", "ns.users"]
        return say(*written, *([quoted(after)] if close else []))

    def end(self, who: int) -> str:
        """What follows a message: of others (0), of the assistant (1), with calls (2)."""
        token = _ENDS[self.on["end"]][who]
        if (self.on["end"] == "last_other" and who) or (self.on["end"] == "three" and who == 1):
            closing = "{% if loop.last and not add_generation_prompt %}" + write("<|return|>") + "{% else %}"
            return closing + write(token + self.separator) + "{% endif %}"
        if who and self.on["last_assistant"] == "left_open":
            return "{% if not loop.last or add_generation_prompt %}" + write(token + self.separator) + "{% endif %}"
        return write(token + self.separator)

    def trimmed(self, expression: str, role: str) -> str:
        how = self.on["trim"]
        if how == "all" or (how == "users" and role == "user"):
            return f"({expression} | trim)"
        if how == "assistant_newlines" and role == "assistant":
            return f"{expression}.lstrip('\\n')"
        if how == "assistant_end" and role == "assistant":
            return f"{expression}.rstrip()"
        return expression

    def tools(self) -> str:
        """The tools as the template describes them."""
        return say(quoted("# Tools\nYou may call these functions:\n"), "tools | tojson", quoted("\n"))

    # -- before the messages -----------------------------------------------------------------------------------------

    def preparation(self) -> str:
        counted = (
            "{% set ns = namespace(sys='', last_user=-1, first_user=-1, brief=false, users=0, calls=0, results=0,"
            " label='', prior='') %}"
            "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}"
            "{% if ns.first_user < 0 %}{% set ns.first_user = loop.index0 %}{% endif %}{% endif %}"
            "{% if m.role == 'system' %}{% set ns.sys = ns.sys ~ ('\\n\\n' if ns.sys else '') ~ m.content %}{% endif %}"
            "{% endfor %}"
        )
        return counted + self.strictness() + self.switch()

    def strictness(self) -> str:
        how = self.on["strict"]
        if how == "alternating":
            return (
                "{% for m in messages %}{% if loop.index0 and m.role == 'user' and messages[loop.index0 - 1].role == "
                "'user' %}{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}"
            )
        if how == "system_first":
            return (
                "{% for m in messages %}{% if loop.index0 and m.role == 'system' %}"
                "{{ raise_exception('System message must be first') }}{% endif %}{% endfor %}"
            )
        return ""

    def switch(self) -> str:
        conditions = {
            "system": "m.role == 'system'",
            "any_user": "m.role == 'user'",
            "last_user": "loop.index0 == ns.last_user",
            "any_message": "true",
            "first_message": "loop.first",
        }
        if self.on["switch"] == "none":
            listening = ""
        else:
            listening = (
                "{% for m in messages %}{% if "
                + conditions[self.on["switch"]]
                + f" and {self.word} in (m.content or '') %}}"
                "{% set ns.brief = true %}{% endif %}{% endfor %}"
            )
        if self.on["keyword"] != "none":
            listening += (
                "{% if enable_thinking is defined and not enable_thinking %}{% set ns.brief = true %}{% endif %}"
            )
        return listening

    def opening(self) -> str:
        """What precedes all messages: date, tools and system text outside of messages."""
        parts = [say("bos_token")] if self.on["bos"] == "token" else []
        system: list[str] = []
        if self.on["date"] == "system":
            system.append(say("'Today is '", "strftime_now('%d %B %Y')", quoted(".\n")))
        if self.on["count"] == "system_says":
            system.append(say("'Messages: '", "messages | length", quoted("\n")))
        if self.on["system"] in ("merged_first", "with_default"):
            system.append(say("ns.sys", quoted("\n")) if self.on["system"] == "merged_first" else "")
        if self.on["system"] == "with_default":
            system.append("{% if not ns.sys %}" + write("You are a helpful model.\n") + "{% endif %}")
        tools = "{% if tools %}" + self.tools() + "{% endif %}"
        if self.on["tools"] == "system":
            system.append(tools)
        if self.on["tools"] == "own_block":
            block = write("<tools>\n") + say("tools | tojson") + write("\n</tools>" + self.separator)
            parts.append("{% if tools %}" + block + "{% endif %}")
        if system:
            needed = "true" if self.on["system"] == "with_default" or len(system) > 1 else "tools"
            before = self.header("'system'", number="0")
            parts.append("{% if " + needed + " %}" + before + "".join(system) + self.end(0) + "{% endif %}")
        return "".join(parts)

    # -- messages ----------------------------------------------------------------------------------------------------

    def messages(self) -> str:
        branches = [
            ("m.role == 'user'", self.user()),
            ("m.role == 'assistant'", self.assistant()),
            ("m.role == 'tool'", self.result()),
            ("m.role == 'system'", self.system()),
        ]
        first, *others = [condition + " %}" + body for condition, body in branches]
        tests = "{% if " + first + "".join("{% elif " + other for other in others) + "{% endif %}"
        return "{% for m in messages %}{% set c = m.content or '' %}" + tests + "{% endfor %}"

    def system(self) -> str:
        if self.on["system"] in ("merged_first", "first_user", "last_user"):
            return ""
        return self.header("'system'") + say(self.trimmed("c", "system")) + self.end(0)

    def user(self) -> str:
        text = [self.header("'user'")]
        if self.on["numbering"] == "user_turns":
            text.insert(0, "{% set ns.users = ns.users + 1 %}")
        for what, content in (("system", say("ns.sys", quoted("\n\n"))), ("tools", self.tools())):
            place = self.on[what]
            if place in ("first_user", "last_user"):
                there = "ns.sys" if what == "system" else "tools"
                text.append(f"{{% if {there} and loop.index0 == ns.{place} %}}{content}{{% endif %}}")
        if self.on["date"] == "users":
            text.append(say("'('", "strftime_now('%Y')", "') '"))
        text.append(say(self.trimmed("c", "user")))
        if self.on["count"] == "last_user_marked":
            text.append("{% if loop.index0 == ns.last_user %}" + write(" (your last question)") + "{% endif %}")
        if self.on["switch_effect"] == "user_suffix":
            text.append("{% if ns.brief %}" + write("\nBe brief.") + "{% endif %}")
        return "".join(text) + self.end(0)

    def assistant(self) -> str:
        on = self.on
        content = say(self.trimmed("c", "assistant"))
        if on["last_assistant"] == "marked":
            content = "{% if loop.last %}" + write("Final: ") + "{% endif %}" + content
        shown = _SHOWN.get(on["thinking"], "false" if on["channels"] == "none" else "reasoning")
        if on["switch_effect"] == "thinking":
            shown = f"({shown}) and not ns.brief"
        called = calls(on, lambda extra: self.header("'assistant'", extra), write(_ENDS[on["end"]][2] + self.separator))
        beside = {"before": content + called, "after": called + content, "dropped": called}.get(on["beside"], called)
        by_calls = "{% if m.tool_calls %}" + beside + self.end(2) + "{% else %}"
        set_reasoning = "{% set reasoning = m.reasoning_content or '' %}"
        if on["channels"] == "framed":
            frame = self.header("'assistant'", close=False)
            thought = frame + write("<|channel|>analysis<|message|>") + say("reasoning") + write("<|end|>")
            body = "{% if " + shown + " and reasoning %}" + thought + "{% endif %}"
            by_calls = "{% if m.tool_calls %}" + self.header("'assistant'") + beside + self.end(2) + "{% else %}"
            final = frame + write("<|channel|>final<|message|>") + content + self.end(1)
            return set_reasoning + body + by_calls + final + "{% endif %}"
        if on["channels"] == "plan_and_final":
            plan = self.header("'assistant:plan'") + say("reasoning") + write(_ENDS[on["end"]][1] + self.separator)
            body = "{% if " + shown + " and reasoning %}" + plan + "{% endif %}"
            by_calls = "{% if m.tool_calls %}" + self.header("'assistant'") + beside + self.end(2) + "{% else %}"
            final = self.header("'assistant:final'") + content + self.end(1)
            return set_reasoning + body + by_calls + final + "{% endif %}"
        thought = write(self.think_open) + say("reasoning") + write(self.think_close)
        body = "{% if " + shown + " %}" + thought + "{% endif %}"
        return set_reasoning + self.header("'assistant'") + body + by_calls + content + self.end(1) + "{% endif %}"

    def result(self) -> str:
        if self.on["beside"] != "after_results":
            return self.bare_result()
        # The text next to the calls is written after the last of their results.
        prior = "{% set ns.prior = '' %}{% for q in messages %}{% if q.tool_calls and loop.index0 < HERE %}"
        prior += "{% set ns.prior = q.content or '' %}{% endif %}{% endfor %}"
        last = "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
        prior = "{% set here = loop.index0 %}" + prior.replace("HERE", "here") + last + "{% if ns.prior %}"
        return self.bare_result() + prior + say("ns.prior") + self.end(1) + "{% endif %}{% endif %}"

    def bare_result(self) -> str:
        text = say("c")
        label, before = result_label(self.on["result_label"])
        if self.on["result"] == "json_lines":
            body = say("{'id': ns.label, 'output': c} | tojson" if label else "{'output': c} | tojson")
        else:
            body = (say("'['", "ns.label", "'] '") if label else "") + text
        if self.on["result"] == "grouped_in_user":
            first = "{% if not loop.index0 or messages[loop.index0 - 1].role != 'tool' %}"
            last = "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
            wrapped = write("\n<tool_response>\n") + body + write("\n</tool_response>")
            return before + first + self.header("'user'") + "{% endif %}" + wrapped + last + self.end(0) + "{% endif %}"
        if self.on["result"] == "bare_tags":
            return before + write("<tool_result>") + body + write("</tool_result>" + self.separator)
        return before + self.header("'tool'") + body + self.end(0)

    # -- after the messages -----------------------------------------------------------------------------------------

    def prompt(self) -> str:
        how = self.on["prompt"]
        if how == "none":
            return ""
        framed = self.on["channels"] != "none"
        text = self.header("'assistant'", number="(messages | length + 1)", close=not framed)
        if self.on["count"] == "prompt_when_long":
            text += "{% if messages | length > 5 %}" + write("(so far: many) ") + "{% endif %}"
        if self.on["date"] == "prompt":
            text += say("strftime_now('%H')", "' '")
        if not framed:
            empty = write(self.think_open + self.think_close)
            usual = {"think_open": write(self.think_open), "think_empty": empty}.get(how, "")
            if self.on["switch_effect"] == "prompt" and (self.on["switch"] != "none" or self.on["keyword"] != "none"):
                usual = "{% if ns.brief %}" + empty + "{% else %}" + usual + "{% endif %}"
            text += usual
        condition = "messages[-1].role != 'assistant'" if how == "always" else "add_generation_prompt"
        return "{% if " + condition + " %}" + text + "{% endif %}"


def compose(case: Case) -> Template:
    """The template that a case's options describe."""
    writer = _Writer(case)
    source = writer.preparation() + writer.opening() + writer.messages() + writer.prompt()
    on = case.options
    found = dict.fromkeys(CONTROL.findall(source))
    if on["header"] in ("role_token", "fullwidth"):
        names = ("system", "user", "assistant", "tool")
        form: Callable[[str], str] = (
            (lambda role: f"<|{role}|>")
            if on["header"] == "role_token"
            else (lambda role: f"<｜{role.capitalize()}｜>")
        )
        found |= dict.fromkeys(map(form, names))
    if on["header"] == "inst" and on["numbering"] == "none":
        written = (role for role in ("system", "user", "assistant", "tool") if f"('{role}' | upper)" in source)
        found |= dict.fromkeys(f"[{role.upper()}]" for role in written)
    if on["header"] == "model_turn":
        found |= {"<start_of_turn>": None}
    eos = _EOS[on["end"]]
    found |= dict.fromkeys(["<s>", eos])
    others = tuple(dict.fromkeys(token for token in _ENDS[on["end"]][1:] if token and token != eos))
    keyword = {"none": {}, "thinking_off": {"enable_thinking": False}, "thinking_on": {"enable_thinking": True}}
    return Template(source, tuple(found), "<s>", eos, others, keyword[on["keyword"]])
