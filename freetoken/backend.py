"""Where a model runs: the device, its number format, the memory it has, and the runner on it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from freetoken.config import Config
from freetoken.device.host import available_ram_bytes
from freetoken.device.memory_plan import MemoryAsk, MemoryPlan, plan_memory
from freetoken.engine.cpu_runner import CpuRunner
from freetoken.engine.cuda_runner import CudaRunner
from freetoken.engine.runner import Runner
from freetoken.errors import ConfigError
from freetoken.kernels.triton_import import HAS_TRITON
from freetoken.kvcache.pool import KvPool
from freetoken.models.decoder import Decoder
from freetoken.models.load import Checkpoint
from freetoken.native import Native, load

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_CPU_RESERVE_BYTES = 512 << 20
"""Left for torch, tokenizer and activations. Half: a long prefill may swap. Double: small machines
lose context."""

_CUDA_RESERVE_BYTES = 3 << 30
"""Left for activations of a long prefill chunk, graphs and the driver. An 8192-token chunk of a
30B-A3B model takes 1.6 GB; half fails there, double costs small cards their context."""

log = logging.getLogger("freetoken")


@dataclass(frozen=True, slots=True)
class Backend:
    """A device and how it is used. Owns the native library's threads on a CPU, until `close`."""

    device: torch.device
    dtype: torch.dtype
    max_prefill_tokens: int
    native: Native | None

    def plan(self, checkpoint: Checkpoint, config: Config) -> MemoryPlan:
        """Size the KV cache from headers. Raises ConfigError if something does not fit."""
        is_cuda = self.device.type == "cuda"
        reserve = _CUDA_RESERVE_BYTES if is_cuda else _CPU_RESERVE_BYTES
        free = torch.cuda.mem_get_info(self.device)[0] if is_cuda else available_ram_bytes()
        engine = config.engine
        return plan_memory(
            MemoryAsk(
                weight_bytes=checkpoint.weight_bytes(self.dtype),
                kv_token_bytes=checkpoint.kv_bytes_per_token(self.dtype),
                model_context=checkpoint.context,
                page_tokens=engine.page_size,
                max_running=engine.max_running_requests,
                available_bytes=free,
                reserve_bytes=reserve,
                num_tokens=engine.num_tokens,
                max_seq_len=engine.max_seq_len,
            )
        )

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
        dtype = _DTYPES.get(config.model.dtype, torch.bfloat16)
        device = torch.device("cuda", torch.cuda.current_device())
        return Backend(device, dtype, config.engine.max_prefill_length or 8192, None)
    dtype = _DTYPES.get(config.model.dtype, torch.float32)
    limit = config.engine.max_prefill_length or 512
    return Backend(torch.device("cpu"), dtype, limit, load())
