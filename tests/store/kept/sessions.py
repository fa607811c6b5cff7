"""The sessions of the record, each made through the HTTP interface of a gateway."""

from __future__ import annotations

import threading
from typing import Any

import httpx2
import numpy as np

from tests.store.kept.scripts import Completion
from tests.store.kept.talking import ADMIN, OTHER, TEAM, Begin, until
from tokentape.client import Client

UNICODE_ID = "unicode.text:-_1"
END = "<|im_end|>"
THOUGHT = "<think>\nfirst, I think\n</think>\n\n"


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    # A key order that no library produces.
    function = {
        "parameters": {"type": "object", "properties": parameters},
        "description": f"{name}: «ü» 🛠️",
        "name": name,
    }
    return {"function": function, "type": "function"}


TOOLS = [tool("lookup", item={"type": "string"}), tool("add", z={"type": "number"}, a={"type": "number"})]


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def exact(begin: Begin) -> None:
    """A single branch: a system message, reasoning, a stream, a reply with only its end, a key, alternatives."""
    talk = begin("exact", [THOUGHT + "It is seven, surely." + END, "Streamed " * 4 + END, END, "Good." + END])
    talk.create(task="sums", tags=["π", "🙂"], nested={"z": 1, "a": [1.5, None, True]})
    talk.messages.append({"role": "system", "content": "You are brief."})
    talk.say("What is 3 + 4?", seed=1, temperature=0.7, top_p=0.9, logprobs=True, top_logprobs=2)
    talk.say("And again?", stream=True)
    talk.say("", headers={"idempotency-key": "only-once"})
    talk.say("<|im_start|> in text is no <|im_end|> token")


def tools(begin: Begin) -> None:
    """Parallel calls, a call in a stream, invalid JSON arguments, an unknown tool."""
    two = called("lookup", '{"item": "pears"}') + "\n" + called("add", '{"z": 1e2, "a": -0.5}')
    single = called("lookup", '{"item": "plums, \\"ripe\\" 🍑"}')
    wrong = called("lookup", "{broken"), called("unknown", "{}")
    script = [THOUGHT + "Both.\n" + two + END, single + END, *(call + END for call in wrong), "Plums are 7." + END]
    talk = begin("tools", script)
    talk.create(task="shop")
    talk.say("How much?", tools=TOOLS)
    talk.results("12", "99.5", tools=TOOLS, stream=True)
    talk.results("7", tools=TOOLS)
    talk.say("you wrote that badly", tools=TOOLS)
    talk.say("there is no such tool", tools=TOOLS)


def forks(begin: Begin) -> None:
    """Branches: edited history, other tools, template kwargs, a retry."""
    talk = begin("forks", [f"answer {n}{END}" for n in range(8)], OTHER)
    talk.say("a")
    talk.say("b")
    kept = list(talk.messages)
    for messages, content, options in (
        (kept[:2], "instead of b", {}),
        ([{"role": "user", "content": "edited a"}, *kept[1:]], "c", {}),
        (kept, "with other tools", {"tools": TOOLS[:1]}),
        (kept, "with kwargs", {"chat_template_kwargs": {"z": 1, "a": [True, None]}}),
        (kept, "d", {}),
    ):
        talk.messages = list(messages)
        talk.say(content, **options)
    talk.messages = kept[:3]
    talk.go_on()


def choices(begin: Begin) -> None:
    """Three choices, of which the second is continued."""
    talk = begin("choices", [f"choice {n}: {'x' * n} ✓{END}" for n in range(3)] + ["after it" + END])
    talk.say("three, please", n=3, choice=1)
    talk.say("go on from the middle one")


def truncated(begin: Begin) -> None:
    """Truncated within reasoning, within content and by a stop string. The gateway closes and continues each."""
    cut = ["<think>\nthinking for much too long", "half a sentence that", "up to a STOP and not beyond"]
    talk = begin("truncated", [text for beginning in cut for text in (beginning, "closed" + END)])
    for options in ({"max_tokens": 5}, {"max_completion_tokens": 4}, {"stop": ["STOP", "never"]}):
        talk.say("something long?", **options)
        talk.say("go on")


def aborted(begin: Begin) -> None:
    """A client that disconnects, an engine that fails, a pause that aborts; then named weights."""
    engine = begin.engine
    talk = begin("aborted", ["before" + END, Completion("a client leaves here, before the end" + END, stall_after=5)])
    talk.say("first")
    body = {"model": "tiny", "messages": [*talk.messages, {"role": "user", "content": "leave"}], "stream": True}
    with talk.http.stream("POST", f"{talk.path}/v1/chat/completions", json=body) as response:
        next(response.iter_bytes())
        engine.stalled.wait(60)
    until(lambda: len(talk.turns()) == 2)
    engine.stalled.clear()
    begin.will_say(Completion("breaks down in the middle" + END, fail_after=4))
    talk.refused("break down", 503)
    begin.will_say(Completion("paused here" + END, stall_after=3))
    asking = threading.Thread(target=talk.refused, args=("pause", 503))
    asking.start()
    engine.stalled.wait(60)
    admin = Client(begin.url, api_key=ADMIN)
    assert admin.pause(abort=True)
    asking.join()
    engine.weight_version = None
    admin.resume("step-12")
    begin.will_say("after all that" + END)
    talk.say("and now?")
    assert len(talk.turns()) == 5


def weights(begin: Begin) -> None:
    """Weights that change between turns and, twice, within a turn."""
    changing = Completion("new ones come while this is sampled" + END, weights=((0, "3"), (4, "4"), (9, "5")))
    talk = begin("weights", ["old weights" + END, changing, Completion("newest" + END, weights=((0, "5"),))])
    talk.say("a")
    talk.say("b", stream=True)
    talk.say("c")
    begin.engine.weight_version = "6"


def unicode(begin: Begin) -> None:
    """Emoji of several code points, combining and right-to-left characters, control characters, white space."""
    text = "Ça va — 好的 👩\u200d👩\u200d👧\u200d👦 e\u0301 שלום"
    talk = begin(UNICODE_ID, [text + END, THOUGHT + "مرحبا 🇨🇭 ﷽ 🧑🏽\u200d🚀" + END], OTHER)
    talk.create(**{"Schlüssel 🗝": "wért", "empty": {}})
    talk.say("naïve façade — 你好 👋🏾 zero\u200bwidth \u202eright-to-left")
    talk.say("tabs\t, nul-free \x07 bell, and \r\n lines  ")


def rewarded(begin: Begin) -> None:
    """Rewards and columns of session, turns and leaves, and corrections of some."""
    talk = begin("rewarded", [THOUGHT + "one" + END, "two" + END, "another two" + END])
    talk.create(task="sums", group=7)
    talk.say("a")
    talk.say("b")
    talk.messages = talk.messages[:3]
    talk.go_on()
    session = talk.client.session(talk.session_id)
    for value in (0.1, 1.0):
        session.reward(value)
    for value in (0.5, -0.25):
        session.reward(value, turn=0)
    for value in (3.0, 1 / 3):
        session.reward(value, leaf=2)
    for trajectory in session.trajectories():
        session.annotate("advantages", np.linspace(-1, 1, len(trajectory.token_ids)), leaf=trajectory.leaf)
    sampled = talk.turns()[1]["sampled_tokens"]
    for first in (1.0, 2.5):
        session.annotate("weights_2", first / np.arange(1, sampled + 1), turn=1)


def snapshots(begin: Begin) -> None:
    """A deleted session, a confirmed and dropped session, and others held by snapshots of two owners."""
    for name in ("deleted", "dropped", "held"):
        talk = begin(name, [f"this one is {name}" + END])
        talk.create(task=name)
        talk.say("what becomes of you?")
    team = Client(begin.url, api_key=TEAM)
    team.session("deleted").delete()
    dropped = team.take_snapshot(["dropped"])
    dropped.confirm(dropped.manifest().digest)
    dropped.drop()
    team.take_snapshot(["held", "exact"])
    Client(begin.url, api_key=OTHER).take_snapshot(["forks"])


def stop_kept(begin: Begin) -> None:
    """A turn that ended with a different stop token than the template's."""
    talk = begin("stop-kept", ["another stop<|endoftext|>", "goes on" + END])
    talk.say("a")
    talk.say("b")


def wire_interfaces(begin: Begin) -> None:
    """A session through each of the other wire interfaces."""
    http = httpx2.Client(base_url=begin.url, headers={"authorization": f"Bearer {TEAM}"}, timeout=60)

    def post(path: str, **body: Any) -> dict[str, Any]:
        answer = http.post(path, json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    begin.will_say("raw text, ended by length", "and on" + END)
    path = "/sessions/completions/v1/completions"
    ids = [5, 6, 7, 900]
    first = post(path, prompt=ids, max_tokens=6, return_token_ids=True, logprobs=1)
    post(path, prompt=[*ids, *first["choices"][0]["token_ids"], 11, 12], max_tokens=9)

    begin.will_say(THOUGHT + called("lookup", '{"item": "figs"}') + END, "Figs are 3." + END)
    path = "/sessions/responses/v1/responses"
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    first = post(path, input="figs?", tools=flat, instructions="be brief")
    (call,) = (item for item in first["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    post(path, input=[result], previous_response_id=first["id"], tools=flat, instructions="be brief")

    begin.will_say(THOUGHT + "Hello." + END, "Bye." + END)
    path = "/sessions/messages/v1/messages"
    asked: list[Any] = [{"role": "user", "content": "hello"}]
    reply = post(path, messages=asked, max_tokens=64, system="be kind")
    asked += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "bye"}]
    post(path, messages=asked, max_tokens=64, system="be kind")


ALL = (
    exact,
    tools,
    forks,
    choices,
    truncated,
    aborted,
    weights,
    unicode,
    rewarded,
    snapshots,
    wire_interfaces,
    stop_kept,
)
