"""What routes know of the world: how far the start is, and the model once it is there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from aiohttp import web

from freetoken.chat.text_model import TextModel
from freetoken.config import ServerConfig
from freetoken.errors import NotReady, UnknownModel
from freetoken.server.loop_lag import LoopLag
from freetoken.types import Progress


@dataclass(slots=True)
class ServerState:
    """Read by every route; written by `app.py` alone, which calls `serve` when it has loaded."""

    progress: Progress = field(default_factory=Progress)
    text: TextModel | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict[str, float])
    """SamplingParams fields for requests that leave them out; see `sampling.defaults_from`."""
    loop_lag: LoopLag = field(default_factory=LoopLag)
    aliases: Collection[str] = ()
    """Further names of the model besides its id: path, base name, `demo`."""

    def serve(
        self, text: TextModel, sampling_defaults: Mapping[str, float], aliases: Collection[str]
    ) -> None:
        """From now on requests are taken."""
        self.progress.phase = "ok"
        self.text = text
        self.sampling_defaults = sampling_defaults
        self.aliases = aliases

    def ready(self) -> TextModel:
        """Return the model. Raises NotReady with the state of the start, or with what ended it."""
        if self.text is not None:
            return self.text
        progress = self.progress
        if progress.phase == "error":
            raise NotReady(f"the model could not be loaded: {progress.error}", retry_after_s=30)
        done = (
            f", {progress.done_bytes} of {progress.total_bytes} bytes"
            if progress.total_bytes
            else ""
        )
        raise NotReady(
            f"the model is loading ({progress.step or progress.phase}{done})", retry_after_s=2
        )

    def model(self, name: str | None) -> TextModel:
        """Return the model if `name` is one of its names; none, "" and "default" mean whatever is
        served.
        """
        text = self.ready()
        if name in (None, "", "default", text.engine.card.id) or name in self.aliases:
            return text
        raise UnknownModel(str(name), text.engine.card.id)


STATE = web.AppKey("state", ServerState)
SERVER_CONFIG = web.AppKey("server_config", ServerConfig)
