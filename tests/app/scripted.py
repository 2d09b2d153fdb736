"""Fake scripts and a tokenizer folder on disk, and a whole server process in this one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from freetoken.app import Server
from freetoken.config import Config, load_config
from freetoken.errors import FreeTokenError
from freetoken.types import Progress
from tests.server.serving import TEMPLATE, byte_tokenizer


@dataclass
class Served:
    """A server that takes requests, and a client's session."""

    server: Server
    url: str
    session: aiohttp.ClientSession


Client = Callable[[Served], Awaitable[None]]


def tokenizer_folder(folder: Path) -> Path:
    """Write the byte vocabulary as a Hugging Face tokenizer; tokens are bytes."""
    folder.mkdir(exist_ok=True)
    byte_tokenizer()._core.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def script(folder: Path, *replies: dict[str, Any], **fields: Any) -> Path:
    """Write a fake script beside its tokenizer."""
    tokenizer_folder(folder / "tokenizer")
    path = folder / "script.json"
    path.write_text(json.dumps({"tokenizer": "tokenizer", "replies": replies, **fields}))
    return path


def serve(path: Path, client: Client, **settings: Any) -> int:
    """Run the server of app.py in this process, beside it a client that outlives it; return the
    exit code. The server stops when the client has ended, if nothing has stopped it before.
    """

    async def main() -> int:
        server = Server(fake_config(path, **settings), Progress())
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def after_ready(base_url: str) -> None:
            url.set_result(base_url)

        async def run() -> int | FreeTokenError:
            try:
                return await server.run(after_ready)
            except FreeTokenError as error:  # out of the group, which would wrap it
                return error

        async with asyncio.TaskGroup() as tasks, aiohttp.ClientSession() as session:
            running = tasks.create_task(run())
            await asyncio.wait((running, url), return_when=asyncio.FIRST_COMPLETED)
            if url.done():
                await client(Served(server, await url, session))
                server._request_stop()
        if isinstance(end := running.result(), FreeTokenError):
            raise end
        return end

    return asyncio.run(main())


def fake_config(path: Path, **settings: Any) -> Config:
    """Settings of a server of scripted replies on a free port."""
    flags = {"model.fake": str(path), "server.port": 0}
    return load_config(flags | {f"server.{k}": v for k, v in settings.items()}, environ={})


def chat(**fields: Any) -> dict[str, Any]:
    """The body of a plain chat."""
    return {"messages": [{"role": "user", "content": "Hi"}], **fields}
