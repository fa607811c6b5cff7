"""Compare how Tokentape and rllm-model-gateway handle faults during a session.

Both run as processes, started as their users start them, with the same mock vLLM server and the official client. For
each case the table shows what the client received, how often the engine was called, and which completions a trainer
would get.

    python -m venv /tmp/rllm && /tmp/rllm/bin/pip install rllm-model-gateway
    python benchmarks/faults_compare.py --rllm /tmp/rllm/bin/rllm-model-gateway
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx2
import openai
from openai import OpenAI

from tokentape.demo import MODEL

QUESTION = {"role": "user", "content": "What is 3 plus 4?"}
LENGTH = 6
"""Tokens of a completion; the last one identifies the generation."""
ACKNOWLEDGED, IN_FLIGHT = 200, 8


@dataclass(frozen=True)
class Fault:
    """A fault of the engine."""

    delay: float = 0.0
    """Seconds before the engine replies."""
    drop_ids: bool = False
    drop_logprob: bool = False
    """Whether the reply has one logprob fewer than ids."""
    status: int = 200
    cut: float = 1.0
    """Share of the reply's events, or bytes, that is sent."""
    then: str = "end"
    """How the reply ends: `end` correctly, `reset` the connection, or `stall`."""


class FakeVllm:
    """Mock of vLLM's completions and chat completions, as far as the two gateways use them."""

    def __init__(self) -> None:
        self.url = ""
        self.fault = Fault()
        self.calls = 0
        self.left = 0
        """Number of calls with a connection that was closed before the reply."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = re.search(r"content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            answering = asyncio.create_task(self.answer(head.split(" ")[1], head, body, writer))
            leaving = asyncio.create_task(reader.read(1))
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            self.left += not answering.done()
            answering.cancel()
            leaving.cancel()
            await asyncio.wait({answering, leaving})
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(self, path: str, head: str, data: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/version":
            await send(writer, [b'{"version": "0.32.0"}'])
        elif path == "/v1/models":
            await send(writer, [b'{"data": [{"id": "m", "max_model_len": 32768}]}'])
        elif path == "/health":
            await send(writer, [b""])
        elif not path.endswith("/completions"):
            await send(writer, [b'{"detail": "Not Found"}'], 404)
        else:
            body, fault = json.loads(data), Fault()
            if "tokentape-probe" not in head:
                fault, self.calls = self.fault, self.calls + 1
            events = (completion if path == "/v1/completions" else chat)(body, self.calls, fault)
            if body.get("stream"):
                pieces = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events[1:]]
                pieces.append(b"data: [DONE]\n\n")
            else:
                whole = json.dumps(events[0]).encode()
                pieces = [whole[:-20], whole[-20:]]
            if fault.status != 200:
                pieces = [b'{"error": {"message": "m", "type": "t", "code": 500}}']
            await asyncio.sleep(fault.delay)
            kept = len(pieces) if fault.cut == 1.0 else int(len(pieces) * fault.cut)
            await send(writer, pieces[:kept], fault.status, end=fault.then == "end")
            if fault.then == "stall":
                await asyncio.Event().wait()
            if fault.then == "reset":
                await asyncio.sleep(0.1)
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()


def sampled(body: dict[str, Any], call: int) -> list[int]:
    limit = body.get("max_tokens") or LENGTH
    return [*range(100, 100 + LENGTH - 1), 200 + call % 3000][:limit]


def completion(body: dict[str, Any], call: int, fault: Fault) -> list[dict[str, Any]]:
    """Return the whole reply and a stream's events, in the format of /v1/completions."""

    def event(ids: Sequence[int], finish: str | None, *, first: bool) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": "x" * len(ids),
            "logprobs": {
                "tokens": [f"token_id:{one}" for one in ids],
                "token_logprobs": [-0.5 for _ in ids][fault.drop_logprob :],
                "top_logprobs": [{f"token_id:{one}": -0.5, "token_id:7": -1.5, "token_id:8": -3.0} for one in ids],
            },
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": None if fault.drop_ids else list(ids),
            "prompt_token_ids": body["prompt"] if first and not fault.drop_ids else None,
        }
        return {"id": "cmpl", "object": "text_completion", "model": "m", "choices": [choice]}

    ids = sampled(body, call)
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids), "total_tokens": 0}
    events = [event([one], "length" if at == len(ids) - 1 else None, first=at == 0) for at, one in enumerate(ids)]
    last = {"id": "cmpl", "choices": [], "usage": usage}
    return [{**event(ids, "length", first=True), "usage": usage}, *events, last]


def chat(body: dict[str, Any], call: int, fault: Fault) -> list[dict[str, Any]]:
    """Return the whole reply and the events of a stream, for /v1/chat/completions with `return_token_ids`."""
    prompt = [*range(10, 10 + 5 * len(body["messages"]))]
    ids = sampled(body, call)

    def choice(ids: Sequence[int], finish: str | None, message: str, role: bool) -> dict[str, Any]:
        entries = [{"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []} for _ in ids]
        said = {**({"role": "assistant"} if role else {}), "content": "x" * len(ids)}
        own = {} if fault.drop_ids else {"token_ids": list(ids)}
        logprobs = {"content": entries[fault.drop_logprob :]}
        return {"index": 0, message: said, "logprobs": logprobs, "finish_reason": finish, "stop_reason": None, **own}

    head = {"id": f"chatcmpl-{call}", "created": 1, "model": "m"}
    echo = {} if fault.drop_ids else {"prompt_token_ids": prompt}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    whole = {**head, **echo, "object": "chat.completion", "choices": [choice(ids, "length", "message", True)]}
    chunk = {**head, "object": "chat.completion.chunk"}
    events = [
        {
            **chunk,
            **(echo if at == 0 else {}),
            "choices": [choice([one], "length" if at == len(ids) - 1 else None, "delta", at == 0)],
        }
        for at, one in enumerate(ids)
    ]
    return [{**whole, "usage": usage}, *events]


async def send(writer: asyncio.StreamWriter, pieces: Sequence[bytes], status: int = 200, *, end: bool = True) -> None:
    writer.write(f"HTTP/1.1 {status} X\r\nconnection: close\r\ntransfer-encoding: chunked\r\n".encode())
    writer.write(b"content-type: application/json\r\n\r\n")
    for piece in pieces:
        if piece:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await asyncio.sleep(0)
    if end:
        writer.write(b"0\r\n\r\n")
    await writer.drain()


@contextmanager
def engine() -> Iterator[FakeVllm]:
    fake = FakeVllm()
    started = threading.Event()
    loop = asyncio.new_event_loop()

    async def listen() -> None:
        server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()

    listening = loop.create_task(listen())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    started.wait()
    yield fake
    assert listening.done()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


class Gateway(Protocol):
    """Gateway that can be restarted on its data."""

    name: str

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def base_url(self, session: str) -> str: ...

    def trainable(self, session: str) -> list[list[int]]:
        """Return the completions of a session that a trainer would get."""
        ...

    def aside(self, session: str) -> str:
        """Return the other reports about the session."""
        ...


class Tokentape:
    """`tokentape serve` with the tiny model's tokenizer and template, with the settings of a fresh installation."""

    name = "Tokentape"

    def __init__(self, fake: FakeVllm, data: Path) -> None:
        self._command = [sys.executable, "-m", "tokentape", "serve", str(MODEL), "--engine", "vllm"]
        self._command += ["--engine-url", fake.url, "--data", str(data), "--port", "0"]

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            print(line, end="", file=sys.stderr)
            if found := re.search(r"at (http://[^/\s]+)/(?:sessions/NAME/)?v1", line):
                self.url = found[1]
                break
        else:
            raise SystemExit("tokentape serve did not start")
        threading.Thread(target=self._process.stderr.read, daemon=True).start()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def base_url(self, session: str) -> str:
        return f"{self.url}/sessions/{session}/v1"

    def trainable(self, session: str) -> list[list[int]]:
        answer = httpx2.get(f"{self.url}/sessions/{session}/trajectories")
        if answer.status_code == 404:
            return []
        turns: dict[int, list[int]] = {}
        for one in answer.json()["data"]:
            for turn, start, end in zip(one["turns"], one["completion_starts"], one["completion_ends"], strict=True):
                turns[turn] = one["token_ids"][start:end]
        return list(turns.values())

    def aside(self, session: str) -> str:
        answer = httpx2.get(f"{self.url}/sessions/{session}")
        if answer.status_code == 404:
            return ""
        aborted = [turn for turn in answer.json()["turns"] if turn["abort_cause"]]
        verdicts = [leaf["verdict"] for leaf in answer.json()["leaves"]]
        told = [f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts) if len(verdicts) > 1]
        told += [f"kept apart, aborted ({turn['abort_cause']}): {turn['sampled_tokens']} ids" for turn in aborted]
        return "; ".join(told)


class Rllm:
    """`rllm-model-gateway` with its SQLite store."""

    def __init__(self, fake: FakeVllm, data: Path, program: str) -> None:
        python = Path(program).with_name("python")
        ask = "from importlib.metadata import version; print(version('rllm-model-gateway'))"
        version = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
        self.name = f"rllm-model-gateway {version}"
        data.mkdir()
        self._command = [program, "--host", "127.0.0.1", "--worker", f"{fake.url}/v1", "--store", "sqlite"]
        self._command += ["--db-path", str(data / "traces.db"), "--log-level", "error"]

    def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen([*self._command, "--port", str(port)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx2.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx2.HTTPError:
                time.sleep(0.1)
        raise SystemExit("rllm-model-gateway did not start")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def base_url(self, session: str) -> str:
        return f"{self.url}/sessions/{session}/v1"

    def _traces(self, session: str) -> list[dict[str, Any]]:
        httpx2.post(f"{self.url}/admin/flush")
        traces: list[dict[str, Any]] = httpx2.get(f"{self.url}/sessions/{session}/traces", timeout=30).json()
        return traces

    def trainable(self, session: str) -> list[list[int]]:
        return [trace["completion_token_ids"] for trace in self._traces(session)]

    def aside(self, session: str) -> str:
        told = []
        for trace in self._traces(session):
            ids, logprobs = len(trace["completion_token_ids"]), len(trace["logprobs"] or ())
            if ids != logprobs:
                told.append(f"a trace with {ids} ids and {logprobs} logprobs")
            if trace["finish_reason"] is None:
                told.append("its finish_reason is null")
        return "; ".join(told)


def ask(gateway: Gateway, session: str, messages: Sequence[Any] = (QUESTION,), **more: Any) -> str:
    """Run one call of the official client and return how it ended."""
    retries, timeout = more.pop("max_retries", 0), more.pop("timeout", 20.0)
    client = OpenAI(base_url=gateway.base_url(session), api_key="none", max_retries=retries, timeout=timeout)
    with client:
        try:
            reply: Any = client.chat.completions.create(model="m", messages=messages, **more)  # type: ignore[call-overload]
            if not more.get("stream"):
                return f"200, {len(reply.choices[0].message.content or '')} characters"
            finishes = [part.finish_reason for chunk in reply for part in chunk.choices if part.finish_reason]
            return "200, stream with finish_reason" if finishes else "200, stream ends without finish_reason"
        except openai.APIStatusError as error:
            typed = f" `{error.code}`" if error.code else ", untyped"
            return f"{error.status_code}{typed}"
        except openai.APITimeoutError:
            return "timeout"
        except openai.APIConnectionError:
            return "connection broken"
        except openai.APIError as error:
            return f"error event `{error.code}`"
        except httpx2.HTTPError:
            return "connection broken"
        except Exception as error:
            # Any exception of the client on a malformed reply is a result of the comparison.
            return f"client raised {type(error).__name__}"


Case = Callable[[Gateway, FakeVllm, str], str]


def one_fault(fault: Fault, *, stream: bool) -> Case:
    """Run a call with `fault` and return what the client saw."""

    def run(gateway: Gateway, fake: FakeVllm, session: str) -> str:
        fake.fault = fault
        return ask(gateway, session, stream=stream)

    return run


def refused(gateway: Gateway, fake: FakeVllm, session: str) -> str:
    fake.fault = Fault(cut=0.0, then="reset")
    return ask(gateway, session)


def impatient(gateway: Gateway, fake: FakeVllm, session: str) -> str:
    """The client times out after a second and retries, its default behavior; the engine takes 1.7 s."""
    fake.fault = Fault(delay=1.7)
    return ask(gateway, session, timeout=1.0, max_retries=2)


def lost_reply(gateway: Gateway, fake: FakeVllm, session: str) -> str:
    """The reply of the first attempt is lost; the client marks its second call as a retry."""
    ask(gateway, session)
    return ask(gateway, session, extra_headers={"x-stainless-retry-count": "1"})


def parallel(gateway: Gateway, fake: FakeVllm, session: str) -> str:
    fake.fault = Fault(delay=0.3)
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda _: ask(gateway, session), range(8)))
    return f"{sum(one.startswith('200') for one in told)} of 8 answered 200"


def leaves(*, stream: bool) -> Case:
    """The client closes its connection: after some tokens of a stream, or while it waits."""

    def run(gateway: Gateway, fake: FakeVllm, session: str) -> str:
        fake.fault = Fault(cut=0.5, then="stall") if stream else Fault(delay=4.0)
        before = fake.left
        host, _, port = gateway.base_url(session).removeprefix("http://").partition("/")[0].partition(":")
        body = json.dumps({"model": "m", "messages": [QUESTION], "stream": stream}).encode()
        with socket.create_connection((host, int(port))) as client:
            path = "/" + gateway.base_url(session).split("/", 3)[3] + "/chat/completions"
            head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            if stream:
                client.recv(1 << 16)
            time.sleep(0.5)
        time.sleep(5.0)
        return "engine's call cancelled" if fake.left > before else "engine's call runs to its end"

    return run


def killed(gateway: Gateway, fake: FakeVllm, session: str) -> str:
    """Run `kill -9` right after 200 acknowledged calls, with 8 more in flight; then restart."""
    lock = threading.Lock()
    heard: dict[str, int] = {}
    enough = threading.Event()

    def talk(number: int) -> None:
        own = f"{session}-{number}"
        messages: list[Any] = []
        while not enough.is_set():
            messages.append({"role": "user", "content": f"question {len(messages)}"})
            if not ask(gateway, own, messages).startswith("200"):
                return
            messages.append({"role": "assistant", "content": "x"})
            del messages[:-8]
            with lock:
                heard[own] = heard.get(own, 0) + 1
                if sum(heard.values()) >= ACKNOWLEDGED:
                    enough.set()

    fake.fault = Fault(delay=0.01)
    threads = [threading.Thread(target=talk, args=(number,)) for number in range(IN_FLIGHT)]
    for thread in threads:
        thread.start()
    enough.wait(120)
    gateway.kill()
    for thread in threads:
        thread.join()
    began = time.monotonic()
    gateway.start()
    seconds = time.monotonic() - began
    lost = sum(max(0, count - len(gateway.trainable(own))) for own, count in heard.items())
    return f"{lost} of {sum(heard.values())} acknowledged calls lost; up again after {seconds:.1f} s"


CASES: dict[str, Case] = {
    "client times out and retries (its default)": impatient,
    "reply lost, client says it retries": lost_reply,
    "8 turns at once in a session": parallel,
    "client leaves, no stream": leaves(stream=False),
    "client leaves mid-stream": leaves(stream=True),
    "reply is half a JSON text": one_fault(Fault(cut=0.5), stream=False),
    "reply without ids": one_fault(Fault(drop_ids=True), stream=False),
    "stream without ids": one_fault(Fault(drop_ids=True), stream=True),
    "one logprob fewer than ids": one_fault(Fault(drop_logprob=True), stream=False),
    "stream ends half way, cleanly": one_fault(Fault(cut=0.5), stream=True),
    "stream is reset half way": one_fault(Fault(cut=0.5, then="reset"), stream=True),
    "engine answers 500": one_fault(Fault(status=500), stream=False),
    "engine drops the connection": refused,
    "kill -9 after 200 acknowledged calls": killed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rllm", metavar="PROGRAM", help="its command; without it, only Tokentape runs")
    given = parser.parse_args()
    table: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as place, engine() as fake:
        gateways: list[Gateway] = [Tokentape(fake, Path(place) / "tokentape")]
        if given.rllm:
            gateways.append(Rllm(fake, Path(place) / "rllm", os.path.abspath(given.rllm)))
        for gateway in gateways:
            gateway.start()
            try:
                for number, (name, case) in enumerate(CASES.items()):
                    fake.fault, fake.calls = Fault(), 0
                    session = f"case-{number}"
                    seen = [case(gateway, fake, session)]
                    fake.fault = Fault()
                    if case is not killed:
                        # Let calls in progress finish.
                        time.sleep(2.5)
                        completions = gateway.trainable(session)
                        seen.append(f"engine asked {fake.calls} times" if fake.calls != 1 else "engine asked once")
                        seen.append(f"completions to train on: {len(completions)} ({sum(map(len, completions))} ids)")
                        seen.append(gateway.aside(session))
                    table.setdefault(name, {})[gateway.name] = "; ".join(one for one in seen if one)
                    print(f"{gateway.name}: {name}: {table[name][gateway.name]}", file=sys.stderr)
            finally:
                gateway.kill()
    names = [gateway.name for gateway in gateways]
    print("| case | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for case_name, cells in table.items():
        print(f"| {case_name} | " + " | ".join(cells[name] for name in names) + " |")


if __name__ == "__main__":
    main()
