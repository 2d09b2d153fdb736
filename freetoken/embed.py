"""The engine inside somebody else's asyncio program: `async with Engine.open(path) as engine`."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from aiohttp import web

from freetoken.assembly import Assembly, assemble
from freetoken.chat.text_model import TextDelta
from freetoken.config import KEYS, Config, load_config
from freetoken.errors import ConfigError
from freetoken.server.application import ServerState, build_application
from freetoken.server.loop_lag import LoopLag
from freetoken.server.sampling import params_from
from freetoken.types import EngineStatistics, ModelCard, Progress, StepHook


class Engine:
    """A loaded model in the caller's loop. Made by `open` only; use it inside that context.

    Settings of a reply are the fields of SamplingParams; what is left out takes the model's own
    defaults (`generation_config`), then those of SamplingParams.
    """

    def __init__(self, assembly: Assembly, config: Config, loop_lag: LoopLag) -> None:
        self._assembly = assembly
        self._loop_lag = loop_lag
        self._config = config
        self._numbers = itertools.count(1)

    @classmethod
    @asynccontextmanager
    async def open(cls, model: str, **settings: object) -> AsyncGenerator[Engine, None]:
        """Load `model` (a folder, a GGUF file, or "demo"), run its engine until the context ends.

        `settings` are those of the command line with underscores: `max_running_requests=4`.
        Raises ConfigError or WeightError if it cannot be loaded. An engine that dies meanwhile
        cancels the block and raises its DeviceError from the context. What the block raises comes
        out as it is.
        """
        config = load_config(_by_path({"model": model, **settings}))
        is_left = threading.Event()  # a caller that gives up while weights load ends the threads
        failure: BaseException | None = None
        try:
            async with assemble(config, Progress(), is_left.is_set) as assembly:
                try:
                    async with asyncio.TaskGroup() as tasks:
                        steps = tasks.create_task(assembly.engine.run(), name="engine")
                        lag = LoopLag()
                        meter = tasks.create_task(lag.run(), name="loop-lag")
                        try:
                            yield cls(assembly, config, lag)
                        finally:
                            steps.cancel()
                            meter.cancel()
                except BaseExceptionGroup as group:
                    # the group is ours; the caller wrote one `async with` and gets one error
                    failure = group.exceptions[0]
                if failure is not None:
                    raise failure
        finally:
            is_left.set()

    @property
    def card(self) -> ModelCard:
        return self._assembly.engine.card

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,  # noqa: ANN401 - fields of SamplingParams, checked by params_from
    ) -> AsyncGenerator[TextDelta, None]:
        """Answer a chat (messages in OpenAI's form). Yields text as steps end; closing it aborts.

        Wrap it in `contextlib.aclosing`: leaving the loop by `break` alone does not close it at
        once. Raises RequestError if the chat or a setting is wrong.
        """
        rendered = await self._assembly.text.render_async(
            messages, tools=tools, template_kwargs=template_kwargs
        )
        async with aclosing(self.generate(rendered.ids, **sampling)) as deltas:
            async for delta in deltas:
                yield delta

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str | None = None,
        **sampling: Any,  # noqa: ANN401 - fields of SamplingParams, checked by params_from
    ) -> AsyncGenerator[TextDelta, None]:
        """Continue a raw prompt, text or token ids. Yields text as steps end; closing it aborts.

        request_id: a name for `abort`; one that still runs is refused. Raises RequestError.
        """
        text = self._assembly.text
        ids = await text.encode(prompt) if isinstance(prompt, str) else prompt
        params = params_from(sampling, self._assembly.sampling_defaults, text.engine.card)
        name = request_id or f"embed-{next(self._numbers)}"
        async with aclosing(text.stream(ids, params, request_id=name)) as deltas:
            async for delta in deltas:
                yield delta

    def abort(self, request_id: str) -> bool:
        """End a request from outside; its stream ends with finish "abort"."""
        return self._assembly.engine.abort(request_id)

    def statistics(self) -> EngineStatistics:
        """One frozen picture of the engine."""
        return self._assembly.engine.statistics()

    def steps(self) -> AsyncGenerator[int, None]:
        """Await step boundaries: yields the number of each finished step."""
        return self._assembly.engine.steps()

    def add_hook(self, hook: StepHook) -> None:
        """Await `hook(step)` after every step, before the next one is planned."""
        self._assembly.engine.add_hook(hook)

    async def drain(self, deadline_s: float) -> bool:
        """Refuse new requests, wait for running ones, abort the rest at the deadline."""
        return await self._assembly.engine.drain(deadline_s)

    def application(self) -> web.Application:
        """The HTTP interface as an aiohttp application, to run or to mount in the caller's own.

        Run it with `AppRunner(app, handler_cancellation=True)`, or clients that leave are computed
        for to the end.
        """
        state = ServerState(Progress("ok"), loop_lag=self._loop_lag)
        assembly = self._assembly
        state.serve(assembly.text, assembly.sampling_defaults, assembly.aliases)
        return build_application(state, self._config.server)


def _by_path(settings: Mapping[str, object]) -> dict[str, object]:
    """Turn the command line's names into setting paths. Raises ConfigError for an unknown one."""
    paths = {key.flag.removeprefix("--").replace("-", "_"): key.path for key in KEYS}
    for name in settings:
        if name not in paths:
            raise ConfigError(
                f"expected a setting, got {name!r}; the settings are {', '.join(paths)}"
            )
    return {paths[name]: value for name, value in settings.items()}
