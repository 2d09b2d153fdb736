"""Where a model runs: the device, its number format, the memory it has, and the runner on it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import prod

import torch

from freetoken import footprint
from freetoken.config import Config
from freetoken.device.host import available_ram_bytes
from freetoken.device.memory_plan import HostAsk, MemoryAsk, MemoryPlan, plan_memory
from freetoken.engine.cpu_runner import CpuRunner
from freetoken.engine.cuda_runner import CudaRunner
from freetoken.engine.runner import Runner
from freetoken.errors import ConfigError
from freetoken.kernels.triton_import import HAS_TRITON
from freetoken.kvcache.pool import KvPool
from freetoken.models.decoder import Decoder
from freetoken.models.load import Checkpoint
from freetoken.models.weights import MAX_READERS
from freetoken.native import Native, load

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_CPU_RESERVE_BYTES = 512 << 20
"""Left for torch, tokenizer and rounding. Half: a long prefill may swap. Double: small machines
lose context."""

_CUDA_RESERVE_BYTES = 1 << 30
"""Left for what the driver takes after the plan is made: code of libraries and kernels, a product's
own scratch, rounding. Half fails where cuBLAS loads late; double costs small cards
their context."""

_CUDA_CONTEXT_BYTES = 640 << 20
"""What the driver takes of a GPU before anything is allocated, for plans of a GPU that is only
described; a present one is asked for what is free."""

_HOST_RESERVE_BYTES = 512 << 20
"""RAM beside a GPU for tokenizer, server and what the driver maps late. Half may swap; double
refuses small machines that would do."""

_CUDA_CHUNKS = (512, 8192)
"""Fewest and most tokens of a prompt chunk. Under 512 weights are read too often for the products
they give; over 8192 nothing is won and other streams wait longer."""

_CPU_CHUNKS = (512, 512)
"""512 tokens keep two cores in products; more only makes other streams wait."""

log = logging.getLogger("freetoken")


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that a start may use, found on this machine or described by a person."""

    is_gpu: bool
    device_bytes: int
    """Free GPU memory; on a CPU the same as `ram_bytes`."""
    ram_bytes: int
    has_native: bool = True


@dataclass(frozen=True, slots=True)
class Backend:
    """A device and how it is used. Owns the native library's threads on a CPU, until `close`."""

    device: torch.device
    dtype: torch.dtype
    native: Native | None

    def plan(self, checkpoint: Checkpoint, config: Config) -> MemoryPlan:
        """Plan memory from headers. Raises ConfigError if something does not fit."""
        plan = plan_memory(memory_ask(checkpoint, config, self.dtype, self.room()))
        for note in plan.notes:
            log.warning("%s", note)
        return plan

    def room(self) -> Room:
        """What is free now."""
        ram = available_ram_bytes()
        if self.device.type == "cpu":
            return Room(False, ram, ram, self.native is not None)
        return Room(True, torch.cuda.mem_get_info(self.device)[0], ram)

    def make_runner(self, decoder: Decoder, plan: MemoryPlan, config: Config) -> Runner:
        """Allocate the KV cache and build the runner. Inside the loop."""
        layers = decoder.spec.kv_layers()
        kv = KvPool(layers, plan.num_pages, plan.page_tokens, decoder.dtype, decoder.device)
        max_running = config.engine.max_running_requests
        if self.device.type == "cpu":
            return CpuRunner(decoder, kv, max_running)
        max_pages = -(-plan.context // plan.page_tokens)
        is_eager = not config.engine.cuda_graphs
        return CudaRunner(decoder, kv, max_running, max_pages, is_eager=is_eager)

    def close(self) -> None:
        """End the native threads, after the runner."""
        if self.native is not None:
            self.native.close()


def described_room(vram_bytes: int | None, ram_bytes: int | None) -> Room:
    """Room of a machine that a person describes; what is not given is taken from this one."""
    ram = available_ram_bytes() if ram_bytes is None else ram_bytes
    if vram_bytes is None:
        return Room(False, ram, ram)
    return Room(True, max(0, vram_bytes - _CUDA_CONTEXT_BYTES), ram)


def choose_dtype(config: Config, *, is_gpu: bool) -> torch.dtype:
    """Return the number format that was asked for, or the device's own."""
    return _DTYPES.get(config.model.dtype, torch.bfloat16 if is_gpu else torch.float32)


def memory_ask(checkpoint: Checkpoint, config: Config, dtype: torch.dtype, room: Room) -> MemoryAsk:
    """Work out from headers and settings what a start needs."""
    spec, size, engine = checkpoint.spec, dtype.itemsize, config.engine
    held = footprint.weights(spec, size)
    loading = _reading_bytes(checkpoint, dtype)
    if room.is_gpu:
        work = footprint.cuda_workspace(
            spec, size, max_running=engine.max_running_requests, page_tokens=engine.page_size
        )
        # A decoding row that finds no place in the graphs goes with the prompts.
        slot_bytes = footprint.cuda_slot_bytes(spec, size) + work.token_bytes
    else:
        work = footprint.cpu_workspace(spec, size, has_native=room.has_native)
        slot_bytes = footprint.cpu_slot_bytes(spec, size) + work.token_bytes
    return MemoryAsk(
        is_gpu=room.is_gpu,
        available_bytes=room.device_bytes,
        dense_bytes=held.dense_bytes,
        expert_bytes=held.expert_bytes,
        kv_token_bytes=checkpoint.kv_bytes_per_token(dtype),
        workspace=work,
        slot_bytes=slot_bytes,
        graph_bytes=_graph_bytes(checkpoint, config, size) if room.is_gpu else 0,
        reserve_bytes=_CUDA_RESERVE_BYTES if room.is_gpu else _CPU_RESERVE_BYTES,
        model_context=checkpoint.context,
        page_tokens=engine.page_size,
        max_running=engine.max_running_requests,
        chunk_range=_CUDA_CHUNKS if room.is_gpu else _CPU_CHUNKS,
        loading_bytes=0 if room.is_gpu else loading,
        num_tokens=engine.num_tokens,
        max_seq_len=engine.max_seq_len,
        max_prefill=engine.max_prefill_length,
        host=_host_ask(config, room.ram_bytes, loading) if room.is_gpu else None,
    )


def _graph_bytes(checkpoint: Checkpoint, config: Config, element_bytes: int) -> int:
    engine = config.engine
    return footprint.cuda_graph_bytes(
        checkpoint.spec,
        element_bytes,
        engine.max_running_requests,
        is_eager=not engine.cuda_graphs,
    )


def _host_ask(config: Config, ram_bytes: int, loading_bytes: int) -> HostAsk:
    pinned = footprint.pinned_bytes(config.engine.max_running_requests)
    return HostAsk(ram_bytes, pinned, loading_bytes, _HOST_RESERVE_BYTES)


def _reading_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """The largest tensors that readers hold at the same time; unpacking goes through float32."""
    sizes = sorted((prod(part.shape) for part in checkpoint.parts), reverse=True)
    return sum(sizes[:MAX_READERS]) * max(4, dtype.itemsize)


def choose_backend(config: Config) -> Backend:
    """Pick the device that was asked for, or the best one here. Raises ConfigError."""
    name = config.model.device
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: expected an NVIDIA GPU that torch can use, got none")
    if has_cuda and not HAS_TRITON:
        text = "expected Triton beside the GPU, got none: pip install 'freetoken[cuda]'"
        if name == "cuda":
            raise ConfigError(f"--device cuda: {text}")
        log.warning("%s; running on the CPU", text)
    if name != "cpu" and has_cuda and HAS_TRITON:
        dtype = choose_dtype(config, is_gpu=True)
        device = torch.device("cuda", torch.cuda.current_device())
        return Backend(device, dtype, None)
    dtype = choose_dtype(config, is_gpu=False)
    return Backend(torch.device("cpu"), dtype, load())
