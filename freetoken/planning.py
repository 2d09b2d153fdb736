"""What `ft plan` prints: the memory plan of a checkpoint on this machine or on a described one, and
the most tokens a second that its memory can give.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pprint import pformat

import msgspec

from freetoken import footprint
from freetoken.assembly import find_checkpoint
from freetoken.backend import choose_dtype, find_room, memory_ask
from freetoken.config import Config
from freetoken.device.memory_plan import (
    Memory,
    MemoryPlan,
    known_uses,
    memory_lines,
    plan_memory,
)
from freetoken.errors import ConfigError
from freetoken.models.load import open_checkpoint
from freetoken.models.spec import DecoderSpec


_SHORT = 1024
"""Tokens of a short chat, at which engines are compared."""


@dataclass(frozen=True, slots=True)
class SpeedBound:
    """Most tokens a second of `streams` together: bandwidth over the bytes that a step must read."""

    streams: int
    context: int
    step_bytes: int
    tok_per_s: float

    def as_text(self) -> str:
        """One line of the plan."""
        word = "stream " if self.streams == 1 else "streams"
        return (
            f"  {self.streams:>4} {word} at {self.context:>9,} tokens of context:"
            f" {self.step_bytes / 1e9:7.3f} GB a step, at most {self.tok_per_s:,.0f} tok/s"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A plan and its figures; a refusal and what is known if there is none."""

    model: str
    dtype: str
    spec: DecoderSpec
    plan: MemoryPlan | None
    known: Memory
    """What a start takes before the first token of context."""
    bounds: tuple[SpeedBound, ...] = ()
    refusal: ConfigError | None = None

    def as_text(self, *, with_spec: bool = False) -> str:
        """Lines for a person."""
        lines = [f"{self.model}, {self.dtype}"]
        if self.plan is None:
            lines += ["memory plan: does not fit", *memory_lines(self.known)]
        else:
            lines.append(self.plan.describe())
            lines += [bound.as_text() for bound in self.bounds]
            lines += [f"note: {note}" for note in self.plan.notes]
        if with_spec:
            lines.append(pformat(self.spec, width=100))
        return "\n".join(lines)

    def as_json(self) -> str:
        """The same for a program."""
        facts = {
            "model": self.model,
            "dtype": self.dtype,
            "plan": self.plan,
            "known": self.known,
            "bounds": self.bounds,
            "refusal": None if self.refusal is None else str(self.refusal),
        }
        return msgspec.json.encode(facts).decode()


def report(
    config: Config, *, vram_bytes: int | None, ram_bytes: int | None, gb_per_s: float | None
) -> Report:
    """Plan for the checkpoint that `config` names; reads headers only.

    vram_bytes, ram_bytes describe a machine; what is not given is taken from this one.
    A model that does not fit is in the report as its `refusal`. Raises ConfigError for other wrong
    settings, WeightError if the files are damaged.
    """
    path = find_checkpoint(config)
    room = find_room(config, vram_bytes, ram_bytes)
    dtype = choose_dtype(config, is_gpu=room.is_gpu)
    name = str(dtype).removeprefix("torch.")
    with closing(open_checkpoint(path)) as checkpoint:
        ask, spec = memory_ask(checkpoint, config, dtype, room), checkpoint.spec
    known = known_uses(ask)
    try:
        plan = plan_memory(ask)
    except ConfigError as error:
        return Report(str(path), name, spec, None, known, refusal=error)
    cases = [(1, min(_SHORT, plan.context)), (1, plan.context)]
    cases.append((ask.max_running, min(_SHORT, plan.context)))
    bounds = _bounds(spec, dtype.itemsize, cases, gb_per_s) if gb_per_s else ()
    return Report(str(path), name, spec, plan, known, bounds)


def _bounds(
    spec: DecoderSpec, element_bytes: int, cases: list[tuple[int, int]], gb_per_s: float
) -> tuple[SpeedBound, ...]:
    """Of each (streams, context), equal ones once."""
    found: list[SpeedBound] = []
    for streams, tokens in dict.fromkeys(cases):
        read = footprint.step_bytes(spec, element_bytes, context=tokens, streams=streams)
        found.append(SpeedBound(streams, tokens, read, streams * gb_per_s * 1e9 / read))
    return tuple(found)
