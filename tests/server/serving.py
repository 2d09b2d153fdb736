"""A whole server on a loopback port: production's runner flags, the real scheduler, scripted
tokens.

Tokens are bytes: a reply's text and its number of tokens are known without a vocabulary.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from freetoken.chat.pieces import byte_alphabet
from freetoken.chat.template import ChatTemplate
from freetoken.chat.text_model import TextModel
from freetoken.chat.tokenizer import Marks, Tokenizer
from freetoken.config import ServerConfig
from freetoken.engine.engine import AsyncEngine, EngineLimits
from freetoken.engine.fake import ScriptedReply, ScriptRunner
from freetoken.engine.request import StepResult
from freetoken.server.application import ServerState, build_application, start
from freetoken.types import Ids, ModelCard, SamplingParams, TokenChunk

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}[{% for t in tools %}{{ t.function.name }} {% endfor %}]{% endif %}"
    "{% if enable_thinking is defined %}(thinking={{ enable_thinking }}){% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
MODEL = "tiny/model"
END = 257


def byte_tokenizer() -> Tokenizer:
    """A vocabulary of the 256 bytes and two special tokens, <|start|> 256 and <|end|> 257."""
    core = Core(models.BPE(vocab=dict(byte_alphabet()), merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|start|>"), AddedToken("<|end|>")])
    names = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    return Tokenizer(core, Marks(256, frozenset({END}), (), names))


def reply(text: str, **settings: Any) -> ScriptedReply:
    """A scripted reply of `text`, one token a byte."""
    return ScriptedReply(tuple(text.encode()), **settings)


class ScriptedFault(RuntimeError):
    """A device that dies because the test says so."""


class GatedRunner(ScriptRunner):
    """Scripted, and every step waits for a permit while the gate is shut."""

    def __init__(self, replies: Sequence[ScriptedReply]) -> None:
        super().__init__(replies)
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.permits = asyncio.Semaphore(0)
        self.failure: Exception | None = None

    async def wait(self, number: int) -> StepResult:
        if not self.is_open.is_set():
            await self.permits.acquire()
        if self.failure is not None:
            raise self.failure
        return await super().wait(number)

    def open(self) -> None:
        """Let this step and all later ones through."""
        self.is_open.set()
        self.permits.release()


class WatchedEngine(AsyncEngine):
    """Tells a test which requests came and which streams were closed, in order."""

    def __init__(self, card: ModelCard, runner: GatedRunner, limits: EngineLimits) -> None:
        super().__init__(card, runner, limits)
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.came: asyncio.Queue[str] = asyncio.Queue()
        self.left: asyncio.Queue[str] = asyncio.Queue()

    async def generate(
        self, prompt: Ids, params: SamplingParams, *, request_id: str
    ) -> AsyncGenerator[TokenChunk, None]:
        self.prompts.append(list(prompt))
        self.params.append(params)
        self.came.put_nowait(request_id)
        try:
            async with aclosing(super().generate(prompt, params, request_id=request_id)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.left.put_nowait(request_id)


@dataclass
class Site:
    """A running server and a client's session."""

    url: str
    port: int
    engine: WatchedEngine
    runner: GatedRunner
    state: ServerState
    session: aiohttp.ClientSession
    engine_task: asyncio.Task[None]

    async def post(self, path: str, body: object) -> tuple[int, dict[str, Any]]:
        """POST JSON (or bytes as they are); return status and JSON reply."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data) as response:
            assert response.content_type == "application/json", await response.text()
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """GET; return status and JSON reply."""
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """POST with stream on; return the events, JSON decoded, and "[DONE]" as text."""
        async with self.session.post(self.url + path, json=body | {"stream": True}) as response:
            text = (await response.read()).decode()
            assert response.status == 200, text
            assert response.headers["Content-Type"].startswith("text/event-stream")
        frames = [frame for frame in text.split("\n\n") if frame and not frame.startswith(":")]
        assert all(frame.startswith("data: ") for frame in frames)
        return [p if p == "[DONE]" else json.loads(p) for p in (f[6:] for f in frames)]

    async def idle(self) -> None:
        """Wait for the step after which nothing runs and no page is in use."""
        async with aclosing(self.engine.steps()) as steps:
            while self.engine.statistics().running or self.engine.statistics().pages.in_use:
                await anext(steps)


@asynccontextmanager
async def serving(
    *replies: ScriptedReply,
    context: int = 2048,
    template: str | None = TEMPLATE,
    keep_alive_s: float = 10.0,
    max_body_bytes: int = 2**20,
    **limits: int,
) -> AsyncIterator[Site]:
    """Serve scripted replies; `limits` are fields of EngineLimits."""
    runner = GatedRunner(replies or (reply("Hello."),))
    card = ModelCard(MODEL, context, 258, frozenset({END}), created=7)
    settings = {"num_pages": 512, "page_tokens": 16, **limits}
    engine = WatchedEngine(card, runner, EngineLimits(**settings))
    tokenizer = byte_tokenizer()
    names = tokenizer.marks.names
    chat_template = None if template is None else ChatTemplate(template, names)
    state = ServerState()
    state.serve(TextModel(engine, tokenizer, chat_template), {}, ("alias", "/models/tiny"))
    config = ServerConfig(keep_alive_s=keep_alive_s, max_body_bytes=max_body_bytes)
    http, port = await start(build_application(state, config), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.TaskGroup() as tasks, aiohttp.ClientSession() as session:
            task = tasks.create_task(_steps(engine))
            yield Site(url, port, engine, runner, state, session, task)
            task.cancel()
    finally:
        await http.cleanup()


async def _steps(engine: AsyncEngine) -> None:
    """The engine's loop; a scripted fault ends it as in production, without ending the test."""
    with suppress(ScriptedFault):
        await engine.run()


def chat(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    """The body of a plain chat."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
