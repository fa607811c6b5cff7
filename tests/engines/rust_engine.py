"""An engine for vLLM's own Rust frontend (`vllm-rs` in the wheel of 0.33), to test its HTTP without a GPU.

The frontend waits for engines on a ZeroMQ socket and sends them requests. This engine repeats the same three ids, with
made-up log-probabilities, and scores prompts with a language model if it has one.

    python tests/engines/rust_engine.py tcp://127.0.0.1:HANDSHAKE_PORT
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import msgspec
import numpy as np
import zmq

SAMPLED = (11, 12, 13)
LOGPROBS = (-0.5, -1.5, -2.5)
OTHERS = ((1, -1.25), (2, -3.0))
MAX_MODEL_LEN = 1024

ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
_STOP, _LENGTH = 0, 1
_RAW_ARRAY = 3
_IDENTITY = (0).to_bytes(2, "little")

Score = Callable[[Sequence[int]], Sequence[float]]
"""Log-probabilities of all ids of a prompt but the first."""

_READY = {
    "max_model_len": MAX_MODEL_LEN,
    "num_gpu_blocks": 64,
    "block_size": 16,
    "dp_stats_address": None,
    "dtype": "float32",
    "vllm_version": "0.33.0",
    "world_size": 1,
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "data_parallel_rank": 0,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 4096,
    "instance_id": "made-up",
    "supports_lora": False,
    "max_loras": 0,
}


@contextmanager
def connected(handshake: str, score: Score | None = None) -> Iterator[None]:
    """Serve the frontend that waits at `handshake` for as long as the context lasts."""
    ended = threading.Event()
    thread = threading.Thread(target=_serve, args=(handshake, score, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _serve(handshake: str, score: Score | None, ended: threading.Event) -> None:
    context = zmq.Context()
    try:
        greeting = _socket(context, zmq.DEALER, handshake)
        greeting.send(msgspec.msgpack.encode({"status": "HELLO", "local": False, "headless": True}))
        while not greeting.poll(100):
            if ended.is_set():
                return
        addresses = msgspec.msgpack.decode(greeting.recv())["addresses"]
        outputs = _socket(context, zmq.PUSH, addresses["outputs"][0])
        inputs = _socket(context, zmq.DEALER, addresses["inputs"][0])
        inputs.send(msgspec.msgpack.encode(_READY))
        greeting.send(msgspec.msgpack.encode({"status": "READY", "local": False, "headless": True}))
        while not ended.is_set():
            if not inputs.poll(50):
                continue
            kind, *frames = inputs.recv_multipart()
            if kind == ADD:
                request = msgspec.msgpack.decode(frames[0])
                for output in _outputs(request, score):
                    # engine_index, outputs, scheduler_stats, timestamp
                    outputs.send(msgspec.msgpack.encode([0, [output], None, 1.0]))
            elif kind == UTILITY:
                call_id = msgspec.msgpack.decode(frames[0])[1]
                outputs.send(msgspec.msgpack.encode([0, [], None, 1.0, [call_id, None, [None, None]]]))
    finally:
        context.destroy(linger=0)


def _socket(context: zmq.Context[Any], kind: int, address: str) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.IDENTITY, _IDENTITY)
    socket.connect(address)
    return socket


def _outputs(request: Sequence[Any], score: Score | None) -> Iterator[list[Any]]:
    """Yield the outputs of a request, a token at a time, with the prompt's log-probabilities in the first."""
    request_id, prompt, _, sampling = request[:4]
    stops = set(sampling.get("stop_token_ids") or ())
    count = sampling.get("max_tokens", 16)
    sampled = list(islice(cycle(zip(SAMPLED, LOGPROBS, strict=True)), min(count, MAX_MODEL_LEN - len(prompt))))
    for at, (token_id, logprob) in enumerate(sampled):
        top = [(token_id, logprob), *OTHERS][: (sampling.get("logprobs") or 0) + 1]
        finish = _STOP if token_id in stops else _LENGTH if at == len(sampled) - 1 else None
        logprob_rows = None if sampling.get("logprobs") is None else _rows([top])
        prompt_rows = None
        if at == 0 and sampling.get("prompt_logprobs") is not None:
            scores = [-1.0] * (len(prompt) - 1) if score is None else score(prompt)
            prompt_rows = _rows([[pair] for pair in zip(prompt[1:], scores, strict=True)], tensors=True)
        stop = token_id if finish == _STOP else None
        yield [request_id, [token_id], logprob_rows, prompt_rows, None, finish, stop]
        if finish is not None:
            return


def _rows(rows: Sequence[Sequence[tuple[int, float]]], *, tensors: bool = False) -> list[Any]:
    """Return ids, log-probabilities and ranks of some positions, as vLLM writes arrays or tensors."""
    ids = np.array([[token_id for token_id, _ in row] for row in rows], np.int32)
    logprobs = np.array([[logprob for _, logprob in row] for row in rows], np.float32)
    ranks = np.ones(len(rows), np.int32)
    arrays = [
        [_dtype(array, tensors), array.shape, msgspec.msgpack.Ext(_RAW_ARRAY, array.tobytes())]
        for array in (ids, logprobs, ranks)
    ]
    return [*arrays, None]


def _dtype(array: Any, tensors: bool) -> str:
    name: str = array.dtype.name if tensors else array.dtype.str
    return name


if __name__ == "__main__":
    import sys

    with connected(sys.argv[1]):
        threading.Event().wait()
