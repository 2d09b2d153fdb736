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
from freetoken.backend import Room, choose_backend, choose_dtype, described_room, memory_ask
from freetoken.config import Config
from freetoken.device.memory_plan import MemoryPlan, plan_memory
from freetoken.models.load import open_checkpoint
from freetoken.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class SpeedBound:
    """Most tokens a second of one stream: bandwidth over the bytes that a step must read."""

    context: int
    step_bytes: int
    tok_per_s: float

    def as_text(self) -> str:
        """One line of the plan."""
        return (
            f"  at {self.context:>7,} tokens of context: {self.step_bytes / 1e9:.3f} GB a token,"
            f" at most {self.tok_per_s:,.0f} tok/s for one stream"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A plan and its figures."""

    model: str
    dtype: str
    plan: MemoryPlan
    spec: DecoderSpec
    bounds: tuple[SpeedBound, ...]

    def as_text(self, *, with_spec: bool = False) -> str:
        """Lines for a person."""
        lines = [f"{self.model}, {self.dtype}", self.plan.describe()]
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
            "bounds": self.bounds,
        }
        return msgspec.json.encode(facts).decode()


def report(
    config: Config, *, vram_bytes: int | None, ram_bytes: int | None, gb_per_s: float | None
) -> Report:
    """Plan for the checkpoint that `config` names; reads headers only.

    vram_bytes, ram_bytes describe a machine; without both it is this one.
    Raises ConfigError if the model does not fit, WeightError if its files are damaged.
    """
    path = find_checkpoint(config)
    room = _room(config, vram_bytes, ram_bytes)
    dtype = choose_dtype(config, is_gpu=room.is_gpu)
    with closing(open_checkpoint(path)) as checkpoint:
        plan = plan_memory(memory_ask(checkpoint, config, dtype, room))
        spec = checkpoint.spec
    bounds = _bounds(spec, dtype.itemsize, plan.context, gb_per_s) if gb_per_s else ()
    return Report(str(path), str(dtype).removeprefix("torch."), plan, spec, bounds)


def _room(config: Config, vram_bytes: int | None, ram_bytes: int | None) -> Room:
    if vram_bytes is not None or ram_bytes is not None:
        return described_room(vram_bytes, ram_bytes)
    with closing(choose_backend(config)) as backend:
        return backend.room()


def _bounds(
    spec: DecoderSpec, element_bytes: int, context: int, gb_per_s: float
) -> tuple[SpeedBound, ...]:
    """At a short context and at the longest one."""
    found: list[SpeedBound] = []
    for tokens in sorted({min(1024, context), context}):
        read = footprint.step_bytes(spec, element_bytes, context=tokens)
        found.append(SpeedBound(tokens, read, gb_per_s * 1e9 / read))
    return tuple(found)
