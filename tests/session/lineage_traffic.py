"""Imitate the traffic of harnesses, with the true edges between branches; print precision and recall of `lineage`.

`python -m tests.session.lineage_traffic` prints the table. Calls are placed in the session as the gateway places them.
Texts are sentences of the repository's documentation and of the tests' corpus, so their authors did not know the rules;
some are in made-up words of other alphabets. docs/how-to/lineage.md says which traffic was imitated.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.session.builders import assistant, make_turn, user
from tokentape._session.lineage import lineage
from tokentape._session.tree import Session
from tokentape.types import LineageEdge, Message, SessionInfo

_ROOT = Path(__file__).parents[2]
_FILES = [*sorted((_ROOT / "docs").glob("**/*.md")), _ROOT / "tests/chat/data/corpus.txt"]
_SENTENCE = re.compile(r"[^.!?\n|`#>]{30,160}[.!?。]")
_ALPHABETS = (
    "абвгдежзиклмнопрстуэюя",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "的一是不了人在有我他这中大来上国个到说们",
    "اbcdetلمنهوي",
)

KINDS = ("subagent", "compaction", "side_call", "retry", "edit")


def _sentences() -> list[str]:
    found: dict[str, None] = {}
    for path in _FILES:
        found.update(
            dict.fromkeys(sentence.strip() for sentence in _SENTENCE.findall(path.read_text(encoding="utf-8")))
        )
    return list(found)


SENTENCES = _sentences()


@dataclass
class Traffic:
    """One session under way, and the edges that are true of it."""

    rng: random.Random
    session: Session = field(default_factory=lambda: Session(SessionInfo("s", 0.0)))
    truth: dict[int, tuple[str, frozenset[int | None], str]] = field(default_factory=dict)
    clock: float = 0.0
    unused: list[str] = field(default_factory=list)

    def text(self, sentences: int = 1) -> str:
        """Return sentences; one time in four in an alphabet of another language."""
        if self.rng.random() < 0.25:
            letters, space = self.rng.choice(_ALPHABETS), self.rng.choice((" ", ""))
            words = ["".join(self.rng.choices(letters, k=self.rng.randint(2, 9))) for _ in range(9 * sentences)]
            return space.join(words) + ("。" if not space else ".")
        # Each sentence is used once, so texts share only what the traffic shares.
        self.unused = self.unused if len(self.unused) >= sentences else self.rng.sample(SENTENCES, len(SENTENCES))
        return " ".join(self.unused.pop() for _ in range(sentences))

    def call(
        self,
        messages: Sequence[Message],
        setup: str = "tools",
        *,
        reply: Message | None = None,
        state: str = "read",
        client: dict[str, Any] | None = None,
        n: int = 1,
        seconds: float = 2.0,
    ) -> tuple[int, list[Message]]:
        """Send a request; return the turn and the messages with its reply."""
        found = self.session.continuation(list(messages), setup)
        parent = None if found.parent is None else found.parent.seq
        fork = self.session.fork_cause(parent, found.new_messages, setup)
        self.clock += seconds
        for choice in range(n):
            self.clock += 0.0001
            seq = len(self.session.turns)
            message = (reply if not choice else None) or assistant(self.text(2))
            turn = make_turn(
                seq,
                parent,
                found.new_messages,
                message,
                setup=setup,
                fork="sibling" if choice else fork,
                finish_reason="abort" if state == "aborted" else "stop",
            )
            notes: dict[str, Any] = {"client": client} if client else {}
            notes |= {"parse_problem": "unclosed"} if state == "unparsed" else {}
            aborted = "client_left" if state == "aborted" else None
            turn = replace(
                turn,
                created_at=self.clock,
                sampling=notes,
                abort_cause=aborted,
                session_id=self.session.info.session_id,
            )
            self.session.add(turn)
            if state == "unread":
                self.session.unread.add(seq)
        first = seq - n + 1
        return first, [*messages, self.session.turns[first].reply]

    def tool_call(self, name: str, **arguments: Any) -> Message:
        """Return a reply with a call."""
        call_id = f"call_{self.rng.getrandbits(40):x}"
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=self.rng.random() < 0.5)}
        return {
            "role": "assistant",
            "content": self.rng.choice([None, self.text()]),
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        }

    def result(self, history: Sequence[Message], text: str) -> list[Message]:
        """Return the history with the result of its last call."""
        return [*history, {"role": "tool", "tool_call_id": history[-1]["tool_calls"][0]["id"], "content": text}]

    def begun(self, rounds: int = 2, client: dict[str, Any] | None = None) -> tuple[int, list[Message]]:
        """Begin a main branch with some tool rounds; return its last turn and history."""
        _, history = self.call([system(self.text(3)), user(self.text(2))], client=client, reply=self.read_file())
        for _ in range(rounds):
            _, history = self.call(self.result(history, self.text(4)), client=client, reply=self.read_file())
        return self.call(self.result(history, self.text(3)), client=client)

    def read_file(self) -> Message:
        """Return a reply that reads a file."""
        return self.tool_call("Read", file_path=f"/home/me/project/src/{self.rng.getrandbits(24):x}.py")

    def true(self, seq: int, kind: str, *parents: int | None, style: str) -> None:
        """Say which edge is true of the branch that begins with a turn."""
        self.truth[seq] = kind, frozenset(parents), style

    def paraphrased(self, text: str, left_out: float) -> str:
        """Return the text with some words omitted, others paraphrased, and new line breaks."""
        words = [word for word in text.split(" ") if self.rng.random() >= left_out]
        return "".join(word + self.rng.choice("    \n") for word in words).strip()


def system(text: str) -> Message:
    """Return a system message."""
    return {"role": "system", "content": text}


Style = Callable[[Traffic], None]


def claude_task(t: Traffic) -> None:
    """Claude Code's Task: the prompt below a reminder, its own tools, the result below a note; some with headers."""
    headers = t.rng.random() < 0.3
    main_client = {"session": "cc"} if headers else None
    _, history = t.begun(1, main_client)
    for number in range(t.rng.randint(1, 2)):
        task = t.text(t.rng.randint(1, 4))
        call = t.tool_call("Task", description=t.text()[:30], prompt=task, subagent_type="general-purpose")
        spawn, history = t.call([*history, user(t.text())], reply=call, client=main_client)
        prompt = f"<system-reminder>{t.text()}</system-reminder>\n{task}" if t.rng.random() < 0.5 else task
        client = {"session": "cc", "agent": f"a{number}", "kind": "subagent"} if headers else None
        child, inner = t.call([system(t.text(2)), user(prompt)], "subtools", client=client, reply=t.read_file())
        _, inner = t.call(t.result(inner, t.text(3)), "subtools", client=client)
        t.true(child, "subagent", spawn, style="Claude Code Task")
        back = str(inner[-1]["content"]) + (f"\nagentId: {child}" if t.rng.random() < 0.5 else "")
        _, history = t.call(t.result(history, back), client=main_client)


def codex_spawn(t: Traffic) -> None:
    """Codex's spawn_agent: the result is an id at once, the child runs in parallel to its parent; some with headers."""
    headers = t.rng.random() < 0.5
    main = {"agent": "thread-main"} if headers else None
    _, history = t.begun(0, main)
    task = t.text(t.rng.randint(1, 3))
    spawn, history = t.call([*history, user(t.text())], reply=t.tool_call("spawn_agent", message=task), client=main)
    client = {"agent": "thread-child", "parent_agent": "thread-main", "kind": "collab_spawn"} if headers else None
    base = [system(t.text(2))] if t.rng.random() < 0.5 else [history[0]]
    _, history = t.call(t.result(history, '{"agent_id": "a-1"}'), client=main)
    child, _ = t.call([*base, user(task)], "subtools", client=client)
    t.true(child, "subagent", spawn, style="Codex spawn_agent")


def opencode_task(t: Traffic) -> None:
    """Opencode's task with the session in the path: its own session in headers only, the result in a note."""
    _, history = t.begun(1, {"session": "ses_a"})
    task = t.text(t.rng.randint(1, 3))
    call = t.tool_call("task", description=t.text()[:20], prompt=task, subagent_type="explore")
    spawn, history = t.call([*history, user(t.text())], reply=call, client={"session": "ses_a"})
    client = {"session": "ses_b", "parent": "ses_a"}
    child, inner = t.call([system(t.text(2)), user(task)], "subtools", client=client, reply=t.read_file())
    _, inner = t.call(t.result(inner, t.text(2)), "subtools", client=client)
    t.true(child, "subagent", spawn, style="opencode task")
    back = f"task_id: ses_b\n\n<task_result>\n{inner[-1]['content']}\n</task_result>"
    t.call(t.result(history, back), client={"session": "ses_a"})


def delegated(t: Traffic) -> None:
    """A supervisor of a framework: the task is paraphrased, the member's reply is the tool's result."""
    _, history = t.begun(1)
    task = t.text(3)
    spawn, history = t.call([*history, user(t.text())], reply=t.tool_call("delegate_work_to_coworker", task=task))
    child, inner = t.call([system(t.text(2)), user(t.paraphrased(task, 0.3) + t.text(1))], "none")
    t.true(child, "subagent", spawn, style="supervisor, task said another way")
    t.call(t.result(history, str(inner[-1]["content"])))


def handoff(t: Traffic) -> None:
    """openai-agents: after transfer_to_NAME the same history continues under other instructions and tools."""
    _, history = t.begun(1)
    spawn, history = t.call([*history, user(t.text())], reply=t.tool_call("transfer_to_billing"))
    history = [system(t.text(2)), *t.result(history, '{"assistant": "billing"}')[1:]]
    child, inner = t.call(history, "billing")
    t.call([*inner, user(t.text())], "billing")
    t.true(child, "subagent", spawn, style="handoff")


def team(t: Traffic) -> None:
    """AutoGen's round robin: each member sees the others' replies as messages of the user."""
    task = user(t.text(2))
    writer = [system(t.text(2)), task]
    first, writer = t.call(writer, "none")
    child, critic = t.call([system(t.text(2)), task, user(str(writer[-1]["content"]))], "none")
    t.true(child, "subagent", first, style="team")
    _, writer = t.call([*writer, user(str(critic[-1]["content"]))], "none")
    t.call([*critic, user(str(writer[-1]["content"]))], "none")


def team_with_a_selector(t: Traffic) -> None:
    """AutoGen's selector: a call before each speaker quotes the conversation; each member speaks once."""
    task = t.text(2)
    conversation, spoke, chosen = [user(task)], [], []
    for name in ("writer", "critic", "editor"):
        quoted = "\n".join(str(message["content"]) for message in conversation)
        selector_message = t.rng.choice((system, user))(f"{t.text(2)} {quoted}")
        chosen.append(t.call([selector_message], "none", reply=assistant(name))[0])
        turn, member = t.call([system(t.text(2)), *conversation], "none")
        spoke.append(turn)
        conversation.append(user(str(member[-1]["content"])))
    t.true(chosen[0], "side_call", spoke[0], style="selector")
    for at in (1, 2):
        t.true(chosen[at], "side_call", spoke[at - 1], style="selector")
        t.true(spoke[at], "subagent", spoke[at - 1], style="team, each speaks once")


def guardrail(t: Traffic) -> None:
    """An output guardrail: another prompt, and the reply as the only message."""
    _, history = t.begun(1)
    last, history = t.call([*history, user(t.text())])
    child, _ = t.call([system(t.text(2)), user(str(history[-1]["content"]))], "none")
    t.true(child, "side_call", last, style="guardrail")


def header_only(t: Traffic) -> None:
    """Only headers show it: Codex's review and window, Claude Code's agents and auxiliary calls."""
    main = {"agent": "main", "window": "main:0"}
    last, history = t.begun(1, main)
    review, _ = t.call(
        [system(t.text(2)), user(t.text(2))],
        "review",
        client={"agent": "r", "kind": "review"} | {"parent_agent": "main"},
    )
    t.true(review, "subagent", last - 2, last - 1, last, style="Codex review")
    root, _ = t.call([history[0], user(t.text(4))], client=main | {"window": "main:1"})
    t.true(root, "compaction", last, style="Codex window")
    session = {"session": "cc"}
    last, history = t.begun(0, session)
    agent, _ = t.call([system(t.text(2)), user(t.text(2))], "sub", client=session | {"agent": "w1"})
    t.true(agent, "subagent", last - 1, last, style="Claude Code workflow")
    own, _ = t.call([system(t.text(2)), user(t.text(1))], "none", client=session | {"kind": "auxiliary"})
    t.true(own, "side_call", last, style="Claude Code auxiliary")


def opencode_title(t: Traffic) -> None:
    """Opencode's title agent: before or after the first turn, with its own system prompt."""
    first = [system(t.text(4)), user(t.text(2))]
    question = f"{t.text()}\n{first[1]['content']}" if t.rng.random() < 0.5 else first[1]["content"]
    before = t.rng.random() < 0.5
    title = t.call([system(t.text(3)), user(question)], "none")[0] if before else None
    main, history = t.call(first, reply=t.read_file())
    title = t.call([system(t.text(3)), user(question)], "none")[0] if title is None else title
    t.call(t.result(history, t.text(2)))
    t.true(title, "side_call", main, style="title")


def title_of_single_reply(t: Traffic) -> None:
    """As a run of opencode 1.18.33 sent it: the title first, then a main branch that ends with its first reply."""
    question = user(t.text())
    title, _ = t.call([system(t.text(3)), user(t.text()), question], "none")
    main, _ = t.call([system(t.text(4)), question])
    t.true(title, "side_call", main, style="title of one reply")


def suggestion(t: Traffic) -> None:
    """A question about the whole conversation, under another system prompt, as messages or as quoted text."""
    last, history = t.begun(t.rng.randint(0, 2))
    if t.rng.random() < 0.5:
        messages = [system(t.text(2)), *history[1:], user(t.text())]
    else:
        messages = [
            system(t.text(2)),
            user("\n".join(f"{message['role']}: {message.get('content')}" for message in history[1:])),
        ]
    side, _ = t.call(messages, "none")
    t.call([*history, user(t.text())])
    t.true(side, "side_call", last, style="question about the conversation")


def beside(t: Traffic) -> None:
    """An instruction at the end of the history, sent while or after the main branch continues."""
    last, history = t.begun(1)
    _, more = t.call([*history, user(t.text())], reply=t.read_file())
    side, _ = t.call([*history, user(t.text())])
    t.call(t.result(more, t.text(2)))
    t.true(side, "side_call", last, style="instruction beside the main branch")


def claude_compact(t: Traffic) -> None:
    """Claude Code: the summary is requested in the same branch, its analysis is removed, and a preamble is added."""
    last, history = t.begun(t.rng.randint(1, 4))
    body = t.text(t.rng.randint(4, 12))
    summary, _ = t.call(
        [*history, user(t.text(3))], reply=assistant(f"<analysis>{t.text(1)}</analysis><summary>{body}")
    )
    text = f"{t.text()}\nSummary:\n{t.paraphrased(body, t.rng.choice([0, 0, 0.1]))}"
    root, more = t.call([history[0], user(text)], reply=t.read_file())
    t.call(t.result(more, t.text(2)))
    t.true(root, "compaction", last, summary, style="Claude Code compaction")


def claude_compact_kept(t: Traffic) -> None:
    """Claude Code 2.1.330, as observed: the last reply is kept, and files are read again."""
    last, history = t.begun(t.rng.randint(1, 4))
    body = t.text(t.rng.randint(4, 12))
    summary, _ = t.call([*history[:-1], user(t.text(3))], reply=assistant(body))
    t.true(summary, "side_call", last - 1, style="Claude Code's summary beside the last reply")
    read = history[-3]["tool_calls"][0]["function"]["arguments"]
    again = user(f"Called the Read tool with the following input: {read}\nResult of calling the Read tool: {t.text(2)}")
    root, _ = t.call([history[0], user(f"{t.text()}\n{body}\n{t.text()}"), history[-1], again, user(t.text())])
    t.true(root, "compaction", last - 1, summary, style="Claude Code compaction with kept messages")


def codex_compact(t: Traffic) -> None:
    """Codex: as Claude Code, but the user's messages are kept before the summary; some with a window id."""
    headers = t.rng.random() < 0.4
    client = {"agent": "main", "window": "main:0"} if headers else None
    last, history = t.begun(t.rng.randint(1, 4), client)
    summary, summarized = t.call([*history, user(t.text(2))], reply=assistant(t.text(6)), client=client)
    kept = [message for message in history if message["role"] in ("system", "user")]
    text = f"{t.text()}\n{summarized[-1]['content']}"
    after = {"agent": "main", "window": "main:1"} if headers else None
    root, _ = t.call([*kept, user(text)], client=after)
    t.true(root, "compaction", last, summary, style="Codex compaction")


def opencode_compact(t: Traffic) -> None:
    """opencode: the compaction agent has the history under its own prompt; its reply is an assistant's message."""
    last, history = t.begun(t.rng.randint(1, 4))
    side, side_history = t.call([system(t.text(2)), *history[1:], user(t.text())], "none", reply=assistant(t.text(6)))
    t.true(side, "side_call", last, style="compaction agent")
    root, _ = t.call([history[0], user(t.text()), assistant(str(side_history[-1]["content"])), user(t.text())])
    t.true(root, "compaction", last, side, style="opencode compaction")


def opencode_compact_and_rewind(t: Traffic) -> None:
    """opencode: a replaced message before a compaction, and another one after it."""
    _, history = t.begun(1)
    before, _ = t.call([*history, user(t.text())])
    last, history = t.call([*history, user(t.text())])
    t.true(last, "edit", before, style="rewound, then compacted by an agent")
    quoted = " ".join(str(message["content"]) for message in history[1:])
    side, side_history = t.call([system(t.text(2)), user(f"{t.text()} {quoted}")], "none", reply=assistant(t.text(6)))
    t.true(side, "side_call", last, style="compaction agent")
    begin = [history[0], user(t.text()), assistant(str(side_history[-1]["content"]))]
    root, _ = t.call([*begin, user(t.text())])
    t.true(root, "compaction", last, side, style="opencode compaction")
    again, more = t.call([*begin, user(t.text())])
    t.true(again, "edit", root, style="rewound after a compaction")
    if t.rng.random() < 0.5:
        t.call([*more, user(t.text())])


def qwen_compact(t: Traffic) -> None:
    """Qwen Code: a summary under its own prompt, then a confirmation and the last messages unchanged."""
    last, history = t.begun(t.rng.randint(3, 5))
    side, side_history = t.call([system(t.text(2)), *history[1:-1], user(t.text())], "none", reply=assistant(t.text(6)))
    root, _ = t.call(
        [history[0], user(str(side_history[-1]["content"])), assistant(t.text()), *history[-2:], user(t.text())]
    )
    t.true(side, "side_call", last - 1, style="compression call")
    t.true(root, "compaction", last - 1, last, style="Qwen Code compaction")


def summary_elsewhere(t: Traffic) -> None:
    """Another model, which is not recorded, wrote the summary; the last messages are kept."""
    last, history = t.begun(t.rng.randint(3, 5))
    root, _ = t.call([history[0], user(t.text(5)), *history[-3:], user(t.text())])
    t.true(root, "compaction", last, style="summary of another model")


def sdk_retry(t: Traffic) -> None:
    """An SDK's or a harness's retry after its client left, or after a reply that could not be parsed."""
    _, history = t.begun(t.rng.randint(0, 1))
    history = [*history, user(t.text())]
    state = t.rng.choice(["aborted", "aborted", "unread", "unparsed"])
    failed, _ = t.call(history, state=state)
    for again in range(t.rng.randint(1, 2)):
        client = {"retry": str(again + 1)} if t.rng.random() < 0.3 else None
        final = again == 1 or t.rng.random() < 0.7
        seq, more = t.call(history, client=client, state="read" if final else state)
        t.true(seq, "retry", failed, style=f"retry after a reply that was {state}")
        if final:
            t.call([*more, user(t.text())])
            break
        failed = seq


def retried_root(t: Traffic) -> None:
    """The first call of a session is sent again."""
    first = [system(t.text(3)), user(t.text())]
    failed, _ = t.call(first, state="aborted")
    seq, history = t.call(first)
    t.true(seq, "retry", failed, style="retry of a first call")
    t.call([*history, user(t.text())])


def rewound(t: Traffic) -> None:
    """A user rewinds and sends something else."""
    _, history = t.begun(1)
    first, more = t.call([*history, user(t.text())], reply=t.read_file())
    t.call(t.result(more, t.text(2)))
    seq, more = t.call([*history, user(t.text())])
    t.call([*more, user(t.text())])
    t.true(seq, "edit", first, style="rewound")


def cleared_results(t: Traffic) -> None:
    """Old tool results are cleared or cut short, all else is the same."""
    last, history = t.begun(t.rng.randint(2, 4))
    at = next(at for at, message in enumerate(history) if message["role"] == "tool")
    short = t.rng.choice(["[cleared]", str(history[at]["content"])[:40]])
    seq, _ = t.call([*history[:at], {**history[at], "content": short}, *history[at + 1 :], user(t.text())])
    t.true(seq, "edit", last, style="tool results cleared")


def edited_system(t: Traffic) -> None:
    """The system prompt changes in a few words in mid-session, as one with a date or a list of files does."""
    last, history = t.begun(t.rng.randint(1, 3))
    prompt = str(history[0]["content"])
    at = t.rng.randrange(len(prompt))
    edited = prompt[:at] + t.text()[: t.rng.randint(5, 30)] + prompt[at + 10 :]
    seq, _ = t.call([system(edited), *history[1:], user(t.text())])
    t.true(seq, "edit", last, style="system prompt edited")


def edited_first(t: Traffic) -> None:
    """The first message of the user is sent again with a few words changed."""
    first = [system(t.text(3)), user(t.text(3))]
    root, history = t.call(first, reply=t.read_file())
    t.call(t.result(history, t.text(2)))
    seq, _ = t.call([first[0], user(f"{first[1]['content']} {t.text()[:40]}")], reply=t.read_file())
    t.true(seq, "edit", root, style="first message edited")


def left_out_text(t: Traffic) -> None:
    """CrewAI omits the text of the first reply next to its call."""
    first, history = t.call([system(t.text(3)), user(t.text())], reply={**t.read_file(), "content": t.text()})
    seq, _ = t.call(t.result([*history[:-1], {**history[-1], "content": None}], t.text(2)))
    t.true(seq, "edit", first, style="text left out")


def negatives(t: Traffic) -> None:
    """No edge: tasks that share a system prompt, several choices, samples of one prompt that were all read."""
    prompt, shared = system(t.text(3)), user(t.text())
    for _ in range(t.rng.randint(2, 4)):
        _, history = t.call([prompt, user(t.text(2))], reply=t.read_file())
        t.call(t.result(history, t.text(2)), n=t.rng.randint(1, 3))
    for _ in range(t.rng.randint(2, 4)):
        t.call([prompt, shared], n=t.rng.randint(1, 2))


def equal_prompts(t: Traffic) -> None:
    """No edge: unrelated conversations with equal system prompts and equal or short first messages, all read."""
    prompt = system(t.text(3))
    hello = user(t.rng.choice(["hi", "continue", "fix the tests", "hallo", "继续"]))
    for _ in range(3):
        _, history = t.call([prompt, hello], seconds=30)
    t.call([*history, user(t.text())])
    t.call([system(t.text(3)), hello, assistant(t.text()), user(t.text())], "other")
    t.call([system(t.text(3)), user(t.text(2))], "other")


def mixed(t: Traffic) -> None:
    """Four of the others in one session, as one agent with many tasks makes them."""
    for style in t.rng.sample(STYLES, 4):
        style(t)


STYLES: tuple[Style, ...] = (
    *(
        header_only,
        claude_task,
        codex_spawn,
        opencode_task,
        delegated,
        handoff,
        team,
        team_with_a_selector,
        guardrail,
        opencode_title,
        title_of_single_reply,
        suggestion,
        beside,
    ),
    *(
        claude_compact,
        claude_compact_kept,
        codex_compact,
        opencode_compact,
        opencode_compact_and_rewind,
        qwen_compact,
        summary_elsewhere,
    ),
    *(sdk_retry, retried_root, rewound, cleared_results, edited_system, edited_first, left_out_text),
    *(negatives, equal_prompts),
)


@dataclass(frozen=True)
class Scores:
    """Counts by kind, and the missed or wrong edges by the style of traffic."""

    right: Counter[str]
    found: Counter[str]
    true: Counter[str]
    misses: Counter[str]

    def precision(self, kind: str) -> float:
        """Of the edges found."""
        return self.right[kind] / max(self.found[kind], 1)

    def recall(self, kind: str) -> float:
        """Of the edges that are true."""
        return self.right[kind] / max(self.true[kind], 1)


def scored(
    seeds: Sequence[int], rules: Callable[..., list[LineageEdge]] = lineage, styles: Sequence[Style] | None = None
) -> Scores:
    """Run every style of traffic once per seed and compare the edges with the true ones, parents too."""
    right, found, true, misses = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for seed in seeds:
        for style in styles or (*STYLES, mixed):
            t = Traffic(random.Random(f"{seed} {style.__name__}"))
            style(t)
            edges = {edge.turn: edge for edge in rules(t.session)}
            true.update(kind for kind, _, _ in t.truth.values())
            found.update(edge.kind for edge in edges.values())
            for seq in edges.keys() | t.truth.keys():
                edge, (kind, parents, name) = edges.get(seq), t.truth.get(seq, ("no edge", frozenset(), style.__name__))
                if edge is not None and edge.kind == kind and edge.parent in parents:
                    right[kind] += 1
                else:
                    was = "none" if edge is None else edge.kind + (" of another turn" if edge.kind == kind else "")
                    misses[f"{name}: expected {kind}, found {was}"] += 1
    return Scores(right, found, true, misses)


def main() -> None:
    """Print the table."""
    scores = scored(range(40))
    print("kind         edges  precision  recall")
    for kind in KINDS:
        print(f"{kind:12} {scores.true[kind]:5}  {scores.precision(kind):9.3f}  {scores.recall(kind):6.3f}")
    for name, count in scores.misses.most_common():
        print(f"{count:5}  {name}")


if __name__ == "__main__":
    main()
