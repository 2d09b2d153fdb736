"""From settings to a served model: opens the checkpoint, plans memory, loads weights, builds engine
and text model. Shared by the server (app.py) and by embedding programs (embed.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from freetoken.backend import Backend, choose_backend
from freetoken.chat.load import TextParts, text_from_folder, text_from_gguf
from freetoken.chat.text_model import TextModel
from freetoken.checkpoint.demo import fetch_demo
from freetoken.checkpoint.gguf import open_gguf
from freetoken.config import Config, EngineConfig
from freetoken.device.memory_plan import MemoryPlan
from freetoken.engine.engine import AsyncEngine, EngineLimits
from freetoken.engine.fake import ScriptedReply, ScriptRunner
from freetoken.errors import ConfigError, FreeTokenError
from freetoken.models.decoder import Decoder
from freetoken.models.load import Checkpoint, load_decoder, open_checkpoint
from freetoken.script import Script, encode_replies, read_script
from freetoken.server.sampling import defaults_from
from freetoken.types import ModelCard, Progress

DEMO, DEMO_DENSE = "demo", "demo-dense"
"""Words that stand for a path: the demo model in its expert form, and the dense model it is made
from.
"""

IsStopping = Callable[[], bool]
log = logging.getLogger("freetoken")


class Stopped(FreeTokenError):
    """The start was given up because the process was asked to end."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """A model ready to be served. `engine.run` is not started: the caller's group does that."""

    engine: AsyncEngine
    text: TextModel
    aliases: Collection[str]
    sampling_defaults: Mapping[str, float]


@asynccontextmanager
async def assemble(
    config: Config, progress: Progress, is_stopping: IsStopping
) -> AsyncGenerator[Assembly, None]:
    """Load what `config` names and build the engine; everything is dropped when the context ends.

    Blocking work runs in threads. Raises ConfigError, WeightError, or Stopped once `is_stopping`.
    """
    note = _Note(progress, is_stopping)
    async with AsyncExitStack() as stack:
        if config.model.fake is not None:
            scripted = await asyncio.to_thread(_read_fake, config, Path(config.model.fake), note)
            assembly = _build_fake(config, scripted)
        else:
            backend = await asyncio.to_thread(choose_backend, config)
            stack.callback(backend.close)
            loaded = await asyncio.to_thread(_load, config, backend, note)
            assembly = _build(config, backend, loaded)
        stack.push_async_callback(assembly.engine.close)
        await asyncio.to_thread(assembly.engine.warm)
        yield assembly


@dataclass(frozen=True, slots=True)
class _Loaded:
    checkpoint: Checkpoint
    decoder: Decoder
    plan: MemoryPlan
    words: TextParts
    aliases: tuple[str, ...]


class _Note:
    """Writes progress from worker threads, and ends them when the process is to stop."""

    def __init__(self, progress: Progress, is_stopping: IsStopping) -> None:
        self._progress = progress
        self._is_stopping = is_stopping

    def __call__(self, step: str, done: int, total: int) -> None:
        if self._is_stopping():
            raise Stopped("the start was interrupted")
        progress = self._progress
        progress.step, progress.done_bytes, progress.total_bytes = step, done, total

    def step(self, name: str) -> Callable[[int, int], None]:
        return lambda done, total: self(name, done, total)


def _load(config: Config, backend: Backend, note: _Note) -> _Loaded:
    """Everything that blocks, in a worker thread: fetch, headers, plan, tokenizer, weights."""
    path, aliases = _find(config, note)
    note("reading headers", 0, 0)
    checkpoint = open_checkpoint(path, backend.native)
    try:
        plan = backend.plan(checkpoint, config)
        log.info("%s", plan.describe())
        note("reading the tokenizer", 0, 0)
        words = _words(checkpoint, config)
        decoder = load_decoder(
            checkpoint, backend.dtype, backend.device, note.step("loading weights"), backend.native
        )
    finally:
        checkpoint.close()
    note("warming up", 0, 0)
    return _Loaded(checkpoint, decoder, plan, words, aliases)


def _build(config: Config, backend: Backend, loaded: _Loaded) -> Assembly:
    """Put the engine together, inside the loop."""
    checkpoint, plan, words = loaded.checkpoint, loaded.plan, loaded.words
    card = ModelCard(
        id=config.model.served_name or loaded.aliases[0],
        context=plan.context,
        vocab=checkpoint.spec.vocab,
        eos_ids=checkpoint.end_ids | words.tokenizer.eos_ids,
        created=int(time.time()),
    )
    runner = backend.make_runner(loaded.decoder, plan, config)
    limits = _limits(config.engine, plan.num_pages, plan.max_prefill_tokens)
    engine = AsyncEngine(card, runner, limits)
    defaults = (
        defaults_from(checkpoint.generation_config)
        if config.model.sampling_defaults == "model"
        else {}
    )
    text = TextModel(engine, words.tokenizer, words.template)
    return Assembly(engine, text, loaded.aliases, defaults)


def _words(checkpoint: Checkpoint, config: Config) -> TextParts:
    template = _template_text(config)
    if checkpoint.kind == "gguf":
        return text_from_gguf(checkpoint.metadata, template)
    return text_from_folder(checkpoint.folder, template)


def _template_text(config: Config) -> str | None:
    if config.model.chat_template is None:
        return None
    path = Path(config.model.chat_template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template: expected a readable text file, got {path}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Scripted:
    script: Script
    words: TextParts
    replies: list[ScriptedReply]
    name: str


def _read_fake(config: Config, path: Path, note: _Note) -> _Scripted:
    script = read_script(path)
    if script.tokenizer is None:
        source = fetch_demo(Path(config.model.cache_dir).expanduser(), note).dense
    else:
        source = path.parent / Path(script.tokenizer).expanduser()
    template = _template_text(config) or script.chat_template
    if source.suffix == ".gguf":
        with closing(open_gguf(source)) as file:
            words = text_from_gguf(file.metadata, template)
    else:
        words = text_from_folder(source, template)
    return _Scripted(script, words, encode_replies(script, words.tokenizer), path.stem)


def _build_fake(config: Config, scripted: _Scripted) -> Assembly:
    """An engine that says what a script says, under the real scheduler. Made inside the loop."""
    limits, words, page_tokens = config.engine, scripted.words, config.engine.page_size
    context = min(scripted.script.context, limits.max_seq_len or scripted.script.context)
    num_tokens = limits.num_tokens or context * limits.max_running_requests
    num_pages = -(-num_tokens // page_tokens)
    card = ModelCard(
        id=config.model.served_name or scripted.name,
        context=min(context, num_pages * page_tokens),
        vocab=words.tokenizer.vocab_size,
        eos_ids=words.tokenizer.eos_ids,
        created=int(time.time()),
    )
    engine = AsyncEngine(
        card,
        ScriptRunner(scripted.replies),
        _limits(limits, num_pages, limits.max_prefill_length or 512),
    )
    text = TextModel(engine, words.tokenizer, words.template)
    return Assembly(engine, text, (scripted.name, "fake"), {})


def _limits(config: EngineConfig, num_pages: int, max_prefill_tokens: int) -> EngineLimits:
    return EngineLimits(
        num_pages=num_pages,
        page_tokens=config.page_size,
        max_running=config.max_running_requests,
        max_queue=config.max_queue,
        max_prefill_tokens=max_prefill_tokens,
        reuse=config.cache_type == "radix",
    )


def find_checkpoint(config: Config) -> Path:
    """Where the model that `config` names is; the demo is fetched if it is not there."""
    return _find(config, _Note(Progress(), lambda: False))[0]


def _find(config: Config, note: _Note) -> tuple[Path, tuple[str, ...]]:
    """Return the checkpoint's path and the names it goes by, the best one first."""
    name = DEMO if config.model.demo else config.model.path
    if name is None:
        raise ConfigError(
            "expected a model to serve, got none; give --model PATH, --demo or --fake"
        )
    if name in {DEMO, DEMO_DENSE}:
        paths = fetch_demo(Path(config.model.cache_dir).expanduser(), note)
        path = paths.moe if name == DEMO else paths.dense
        return path, (_model_name(path), name)
    path = Path(name).expanduser()
    return path, (_model_name(path), name, path.name)


def _model_name(path: Path) -> str:
    resolved = path.resolve()
    return resolved.stem if resolved.suffix == ".gguf" else resolved.name
