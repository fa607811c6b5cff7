"""A gateway in its own process, to be killed: `python serving_process.py MODEL DATA`; prints its URL."""

from __future__ import annotations

import sys

from tokentape.chat._renderer import Renderer
from tokentape.engines._transformers import TransformersEngine
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import serve
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

if __name__ == "__main__":
    model, data = sys.argv[1:]
    engine = TransformersEngine.open(model, threads=1)
    turns = Turns(engine, Renderer.load(model), SqliteStore.open(data))
    serve(create_app(turns, model_id="tiny"), port=0, on_ready=lambda url: print(url, flush=True))
