"""Agents as their makers ship them, on a scripted model: how each is started, and a runner for all.

The script reads two files in parallel, writes a third, reads it and answers. A program is found on the path or in the
folder that `TOKENTAPE_CLI_AGENTS` names, where `npm install` was run; a framework in one of the Pythons of
`TOKENTAPE_HARNESS_PYTHON`, separated as in a path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.gateway.scripted import ScriptedEngine
from tokentape.chat._renderer import Renderer
from tokentape.client import Client
from tokentape.gateway._app import create_app
from tokentape.gateway._pins import Pins
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.types import TokenIds, Trajectory, Turn

SESSION = "agent"
QUESTION = "Add up the fruit of apples.txt and pears.txt in sum.txt."
FILES = {"apples.txt": "There are 31 apples.\n", "pears.txt": "There are 12 pears.\n"}
SUM = "43 pieces of fruit, café 🙂\n"
ANSWER = "There are 43 pieces of fruit. 🙂"
TASK = "Say what these files have in common."
"""What an agent asks a subagent, if it has some."""
ASIDE = "Counts of several kinds of fruit"
"""The reply to calls without the question and the tools: titles, subagents, what comes after a summary."""
SUMMARY = "<summary>\nThe user wants to know how many pieces of fruit there are; sum.txt has the 43.\n</summary>"
"""The reply to calls that ask for a summary in this tag."""

_CONTROL = re.compile(r"(<\|\w+\|>|</?\w+>)")
_AGENT_ID = re.compile(r'"agent_id": ?"([\w-]+)"')
_DEAD_PROXY = "http://127.0.0.1:9"
"""Nothing listens there: what an agent asks of other hosts fails at once."""
OFFLINE = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CONTINUE_TELEMETRY_ENABLED": "0",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "QWEN_TELEMETRY_ENABLED": "false",
}
"""Switches of agents against such requests."""


@dataclass(frozen=True, slots=True)
class Agent:
    """How an agent is started. `{url}`, `{base}` (with `/v1`) and `{home}` in its texts are replaced."""

    package: str
    arguments: Sequence[str]
    """The program first; a name that ends in `.py` is one of `agents/`."""
    read: tuple[str, str]
    """The tool that reads a file, and its arguments as JSON with `{path}`."""
    write: tuple[str, str]
    """The same for writing, with `{path}` and `{text}`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts by path below the home."""
    ignored: frozenset[str] = frozenset()
    """What the gateway accepts from it and does not enforce."""
    delegate: Sequence[tuple[str, str]] = ()
    """The calls that start a subagent and wait for it: tools, and arguments with `{task}` and `{agent}`, its id."""
    later: Sequence[Sequence[str]] = ()
    """Arguments of further commands in the same session of the agent."""
    roles: Sequence[str] = ("main",)
    """Of each branch."""
    forks: Sequence[str] = ()
    """Why each branch but the first to be answered began."""
    edges: Set[str] = frozenset()
    """The kinds of the edges between its branches."""


class AgentEngine(ScriptedEngine):
    """Says what moves an agent on, in splits that the tokenizer does not make; keeps prompts and completions."""

    def __init__(self, renderer: Renderer, script: Sequence[str], tool: str) -> None:
        super().__init__(renderer, script, sampling=self.EVERYTHING)
        self._shows_tool = f'"name": "{tool}"'
        self.sampled: list[tuple[list[int], list[int]]] = []
        """Per call the prompt and the completion."""

    def reply_ids(self, prompt_ids: TokenIds) -> list[int]:
        prompt = self._tokenizer.decode(prompt_ids)
        rounds = prompt.count("<|im_start|>assistant\n") - 1
        own = self._shows_tool in prompt and QUESTION in prompt and rounds < len(self.replies)
        started = _AGENT_ID.search(prompt)
        reply = self.replies[rounds].replace("{agent}", started[1] if started else "") if own else f"{ASIDE}<|im_end|>"
        ids = self._split(f"{SUMMARY}<|im_end|>" if "<summary>" in prompt else reply)
        self.sampled.append((prompt_ids.tolist(), ids))
        return ids

    def _split(self, text: str) -> list[int]:
        encode = self._tokenizer.encode_plain
        parts = [
            [piece] if _CONTROL.fullmatch(piece) else re.findall(r"(?s).{1,3}", piece) for piece in _CONTROL.split(text)
        ]
        ids = [token_id for part in parts for piece in part for token_id in encode(piece)]
        assert self._tokenizer.decode(ids) == text
        assert ids != encode(text)
        return ids


@dataclass(slots=True)
class Answered:
    """What the gateway answered, seen from outside."""

    app: ASGIApp
    statuses: list[tuple[str, int]] = field(default_factory=list)
    """Path and status per request."""
    ignored: set[str] = field(default_factory=set)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.statuses.append((f"{scope['method']} {scope['path']}", message["status"]))
                named = dict(message["headers"]).get(b"x-tokentape-ignored-params", b"").decode()
                self.ignored.update(filter(None, named.split(", ")))
            await send(message)

        await self.app(scope, receive, noting if scope["type"] == "http" else send)


@dataclass(frozen=True, slots=True)
class AgentRun:
    output: str
    """Both streams of the program."""
    engine: AgentEngine
    statuses: Sequence[tuple[str, int]]
    ignored: Set[str]
    turns: Sequence[Turn]
    branches: Sequence[Trajectory]


@cache
def program_of(name: str, package: str) -> str | None:
    """Return the path of a program, or of the Python that has the package of a script; None if there is none."""
    if not name.endswith(".py"):
        folder = os.environ.get("TOKENTAPE_CLI_AGENTS")
        return shutil.which(name, path=f"{folder}/node_modules/.bin" if folder else None) or shutil.which(name)
    module = package.partition("[")[0].replace("-", "_")
    has = f"import importlib.util; raise SystemExit(importlib.util.find_spec({module!r}) is None)"
    pythons = filter(None, os.environ.get("TOKENTAPE_HARNESS_PYTHON", "").split(os.pathsep))
    return next((python for python in pythons if subprocess.run([python, "-c", has]).returncode == 0), None)


def run_agent(agent: Agent, renderer: Renderer, scratch: Path, *, pins: Mapping[str, Any] | None = None) -> AgentRun:
    """Run an agent to its end in its own home and folder. Raises `AssertionError` if it fails."""
    home, folder = scratch / "home", scratch / "folder"
    home.mkdir()
    folder.mkdir()
    for path, text in FILES.items():
        (folder / path).write_text(text, "utf-8")
    engine = AgentEngine(renderer, _script(agent, folder), agent.write[0])
    with SqliteStore.open(scratch / "record") as store:
        answered = Answered(create_app(Turns(engine, renderer, store, pins=Pins.read(pins or {}, {})), model_id="m"))
        with running(answered) as gateway, Client(gateway) as client:
            url = f"{gateway}/sessions/{SESSION}"
            names, output = {"{url}": url, "{base}": f"{url}/v1", "{home}": str(home)}, ""
            for arguments in (agent.arguments, *agent.later):
                run = _run(agent, arguments, names, home, folder)
                output += run.stdout + run.stderr
                assert run.returncode == 0, (answered.statuses, output[-4000:])
            assert [session.info.session_id for session in store.sessions()] == [SESSION]
            statuses, turns = list(answered.statuses), store.load_session(SESSION).turns
            return AgentRun(output, engine, statuses, answered.ignored, turns, client.session(SESSION).trajectories())


def _run(
    agent: Agent, arguments: Sequence[str], names: Mapping[str, str], home: Path, folder: Path
) -> subprocess.CompletedProcess[str]:
    def filled(text: str) -> str:
        for name, value in names.items():
            text = text.replace(name, value)
        return text

    for path, text in agent.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(filled(text), "utf-8")
    name, *rest = map(filled, arguments)
    program = program_of(name, agent.package)
    assert program is not None
    script = [str(Path(__file__).parent / "agents" / name)] if name.endswith(".py") else []
    environment = {
        # Its own Node first: programs of npm begin with `env node`.
        "PATH": os.pathsep.join([str(Path(program).parent), os.environ["PATH"]]),
        "HOME": str(home),
        "TMPDIR": str(home),
        "AGENT_BASE_URL": names["{base}"],
        "NO_PROXY": "127.0.0.1,localhost",
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), _DEAD_PROXY),
        **OFFLINE,
        **{name: filled(value) for name, value in agent.environment.items()},
    }
    return subprocess.run(
        [program, *script, *rest],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1800,
    )


def _script(agent: Agent, folder: Path) -> list[str]:
    """Return the replies of the rounds, in the tiny model's template."""

    def call(tool: tuple[str, str], path: str = "") -> str:
        name, arguments = tool
        text = json.dumps(SUM, ensure_ascii=False)[1:-1]
        filled = arguments.replace("{path}", str(folder / path)).replace("{text}", text).replace("{task}", TASK)
        return f'<tool_call>\n{{"name": "{name}", "arguments": {filled}}}\n</tool_call>'

    reads = "\n".join(call(agent.read, path) for path in FILES)
    return [
        *(f"I ask a helper.\n{call(task)}<|im_end|>" for task in agent.delegate),
        f"<think>\nBoth files, then the sum.\n</think>\n\nI read both files — 🍎 and 🍐.\n{reads}<|im_end|>",
        f"{call(agent.write, 'sum.txt')}<|im_end|>",
        f"I check it.\n{call(agent.read, 'sum.txt')}<|im_end|>",
        f"{ANSWER}<|im_end|>",
    ]


AGENTS = {
    "claude": Agent(
        package="@anthropic-ai/claude-code",
        arguments=["claude", "-p", QUESTION, "--model", "m", "--allowedTools", "Read,Write"],
        read=("Read", '{"file_path": "{path}"}'),
        write=("Write", '{"file_path": "{path}", "content": "{text}"}'),
        environment={"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "none"},
        ignored=frozenset({"thinking.display", "output_config.effort", "tools.defer_loading"}),
        delegate=[("Agent", '{"description": "Compare", "prompt": "{task}", "run_in_background": false}')],
        later=[["claude", "-p", "--continue", words, "--model", "m"] for words in ("/compact", "Is it right?")],
        # The summary follows the last reply, which is kept.
        roles=["main", "subagent", "side_call", "main"],
        forks=["new_setup", "branched", "edited_history"],
        edges={"subagent", "side_call", "compaction"},
    ),
    "codex": Agent(
        package="@openai/codex",
        arguments=["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", QUESTION],
        read=("exec_command", '{"cmd": "cat {path}"}'),
        write=("exec_command", '{"cmd": "printf %s \'{text}\' > {path}"}'),
        environment={"CODEX_HOME": "{home}", "AGENT_KEY": "none"},
        files={
            "config.toml": """
                model = "m"
                model_provider = "tokentape"
                [model_providers.tokentape]
                name = "tokentape"
                base_url = "{base}"
                wire_api = "responses"
                env_key = "AGENT_KEY"
            """
        },
        ignored=frozenset({"tools", "reasoning"}),
        delegate=[
            ("multi_agent_v1__spawn_agent", '{"message": "{task}"}'),
            ("multi_agent_v1__wait_agent", '{"targets": ["{agent}"]}'),
        ],
        roles=["main", "subagent"],
        forks=["new_setup"],
        edges={"subagent"},
    ),
    "opencode": Agent(
        package="opencode-ai",
        arguments=["opencode", "run", "-m", "tokentape/m", QUESTION],
        read=("read", '{"filePath": "{path}"}'),
        write=("write", '{"filePath": "{path}", "content": "{text}"}'),
        environment={"OPENCODE_CONFIG": "{home}/opencode.json"},
        files={
            "opencode.json": """{
                "provider": {"tokentape": {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": "{base}", "apiKey": "none"},
                    "models": {"m": {"name": "m"}}
                }}
            }"""
        },
        delegate=[("task", '{"description": "Compare", "prompt": "{task}", "subagent_type": "general"}')],
        roles=["main", "side_call", "subagent"],
        forks=["new_setup", "new_setup"],
        edges={"side_call", "subagent"},
    ),
    "qwen": Agent(
        package="@qwen-code/qwen-code",
        arguments=["qwen", "-p", QUESTION, "--yolo", "--auth-type", "openai", "--model", "m"],
        read=("read_file", '{"file_path": "{path}"}'),
        write=("write_file", '{"file_path": "{path}", "content": "{text}"}'),
        environment={"OPENAI_BASE_URL": "{base}", "OPENAI_API_KEY": "none"},
        delegate=[("agent", '{"description": "Compare", "prompt": "{task}", "run_in_background": false}')],
        roles=["main", "subagent"],
        forks=["new_setup"],
        edges={"subagent"},
    ),
    "continue": Agent(
        package="@continuedev/cli",
        arguments=["cn", "-p", QUESTION, "--auto", "--config", "{home}/config.yaml"],
        read=("Read", '{"filepath": "{path}"}'),
        write=("Write", '{"filepath": "{path}", "content": "{text}"}'),
        files={
            "config.yaml": """
                name: tokentape
                version: 1.0.0
                schema: v1
                models:
                - name: m
                  provider: openai
                  model: m
                  apiBase: "{base}"
                  apiKey: none
                  roles: [chat]
                  capabilities: [tool_use]
            """
        },
    ),
}


def _framework(package: str, script: str, *, stream: bool, **more: Any) -> Agent:
    """Return how one of `agents/` is started: it takes its question and has the two tools of `agents/files.py`."""
    return Agent(
        package=package,
        arguments=[script, QUESTION],
        read=("read_file", '{"path": "{path}"}'),
        write=("write_file", '{"path": "{path}", "text": "{text}"}'),
        **{"environment": {"AGENT_STREAM": "1" if stream else "0"}, **more},
    )


# It omits the text next to tool calls, so the history differs.
_CREWAI: dict[str, Any] = {
    "ignored": frozenset({"tools.strict"}),
    "roles": ["main"] * 3,
    "forks": ["edited_history", "branched"],
    "edges": {"edit"},
}

AGENTS |= {
    "agno": _framework("agno", "agno_agent.py", stream=False),
    "agno-stream": _framework("agno", "agno_agent.py", stream=True),
    "autogen": _framework("autogen-agentchat", "autogen_agent.py", stream=False),
    "autogen-stream": _framework("autogen-agentchat", "autogen_agent.py", stream=True),
    "crewai": _framework("crewai", "crewai_agent.py", stream=False, **_CREWAI),
    "crewai-stream": _framework("crewai", "crewai_agent.py", stream=True, **_CREWAI),
    "inspect": _framework("inspect-ai", "inspect_agent.py", stream=False, ignored=frozenset({"tools.strict"})),
    "inspect-stream": _framework("inspect-ai", "inspect_agent.py", stream=True, ignored=frozenset({"tools.strict"})),
}
