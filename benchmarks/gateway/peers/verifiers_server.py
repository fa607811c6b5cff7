"""Run verifiers' interception server with its train client, in the environment of verifiers.

    python verifiers_server.py ENGINE_URL MODEL_FOLDER     # prints the server's URL and that of new sessions

A session is a random bearer token, one per rollout. POST to the second URL creates one.
"""

import asyncio
import sys

from aiohttp import web
from renderers import Qwen3RendererConfig
from verifiers.v1.clients.client import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import AgentInfo, Trace, TraceTask


async def main(engine_url: str, model: str) -> None:
    # Keep all reasoning in the context, as the other appending gateways do.
    renderer = Qwen3RendererConfig(thinking_retention="all")
    client = TrainClientConfig(
        base_url=f"{engine_url}/v1", api_key_var="NONE", renderer=renderer, renderer_model_name=model
    )
    server = InterceptionServer()
    kept = []

    async def begin(request: web.Request) -> web.Response:
        trace = Trace.model_construct(
            task=TraceTask.model_construct(type="Task", data=None), agent=AgentInfo.model_construct(config=None)
        )
        session = RolloutSession(ctx=ModelContext(model="m", client=client), trace=trace)
        kept.append(session)
        return web.json_response({"secret": server.register(session)[0]})

    async with server:
        control = web.Application()
        control.router.add_post("/", begin)
        runner = web.AppRunner(control)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        print(f"READY {server.base_url} http://127.0.0.1:{port}/", flush=True)
        await asyncio.Event().wait()


asyncio.run(main(sys.argv[1], sys.argv[2]))
