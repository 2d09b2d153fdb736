"""The server on a GPU with a synthetic Qwen3-30B-A3B, all experts resident:
`python -m bench.gpu [--layers 24] [--client 'python client.py {url} bench']`.

Serves in this process, runs the client against it in another, then measures what a client cannot:
a running stream's gaps beside a long prompt, and the loop's lateness.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import uvloop

from bench.report import Row, publish
from bench.synthetic import qwen3_spec, random_decoder, write_tokenizer
from freetoken import footprint
from freetoken.backend import Backend
from freetoken.chat.load import text_from_folder
from freetoken.chat.text_model import TextModel
from freetoken.config import Config, load_config
from freetoken.device.memory_plan import MemoryPlan
from freetoken.engine.cuda_runner import CudaRunner
from freetoken.engine.engine import AsyncEngine, EngineLimits
from freetoken.kvcache.pool import bytes_per_token
from freetoken.server.application import ServerState, build_application, start
from freetoken.types import ModelCard, Progress, SamplingParams

_CONTEXT = 40960
_KV_TOKENS = 160_000


@dataclass
class Bench:
    """A served synthetic model."""

    engine: AsyncEngine
    runner: CudaRunner
    state: ServerState
    url: str


@asynccontextmanager
async def serving(options: argparse.Namespace, config: Config) -> AsyncIterator[Bench]:
    """Build, warm and serve; prints how long each took."""
    device = torch.device("cuda", 0)
    backend = Backend(device, torch.bfloat16, None)
    began = time.perf_counter()
    decoder = await asyncio.to_thread(
        random_decoder, qwen3_spec(options.layers), torch.bfloat16, device
    )
    page_tokens = config.engine.page_size
    plan = MemoryPlan(_KV_TOKENS // page_tokens, page_tokens, _CONTEXT, options.prefill)
    card = ModelCard("bench", _CONTEXT, decoder.spec.vocab, frozenset())
    limits = EngineLimits(
        plan.num_pages,
        page_tokens,
        max_running=config.engine.max_running_requests,
        max_prefill_tokens=options.prefill,
        gap_s=options.gap_ms / 1e3,
    )
    async with AsyncExitStack() as stack:
        cuda = backend.make_runner(decoder, plan, config)
        assert isinstance(cuda, CudaRunner)
        engine = AsyncEngine(card, cuda, limits)
        stack.push_async_callback(engine.close)
        built_s = time.perf_counter() - began
        await asyncio.to_thread(engine.warm)
        warm_s = time.perf_counter() - began - built_s
        print(f"built in {built_s:.1f} s, warm in {warm_s:.1f} s", flush=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_tokenizer(folder, decoder.spec.vocab)
        words = text_from_folder(folder)
        state = ServerState(Progress("ok"))
        state.serve(TextModel(engine, words.tokenizer, words.template), {}, ("bench",))
        runner, port = await start(build_application(state, config.server), "127.0.0.1", 0)
        stack.push_async_callback(runner.cleanup)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running = [
            tasks.create_task(engine.run(), name="engine"),
            tasks.create_task(state.loop_lag.run(), name="loop-lag"),
        ]
        yield Bench(engine, cuda, state, f"http://127.0.0.1:{port}")
        for task in running:
            task.cancel()


async def decode_rows(engine: AsyncEngine, streams: int, tokens: int) -> list[Row]:
    """Tokens a second without HTTP."""

    async def one(number: int) -> tuple[float, list[float]]:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        prompt = [(7 * i + number) % 250 for i in range(64)]
        stream = engine.generate(prompt, params, request_id=f"d{streams}-{number}")
        times = [time.perf_counter() async for _ in stream]
        gaps = [1e3 * (b - a) for a, b in itertools.pairwise(times)]
        return times[0], gaps

    results = await asyncio.gather(*(one(i) for i in range(streams)))
    seconds = time.perf_counter() - max(first for first, _ in results)
    gaps = sorted(gap for _, gaps in results for gap in gaps)
    rate = streams * (tokens - 1) / seconds
    return [
        Row(f"decode without HTTP, {streams} streams", rate, "tok/s"),
        Row("  gap p50", statistics.median(gaps), "ms"),
        Row("  gap p99", gaps[int(0.99 * len(gaps))], "ms"),
    ]


async def first_rows(engine: AsyncEngine, lengths: list[int]) -> list[Row]:
    """The first request of each length against the second: nothing may be compiled on demand."""
    rows: list[Row] = []
    params = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)
    for length in lengths:
        taken: list[float] = []
        for turn in range(2):
            prompt = [(13 * i + 101 * turn + length) % 250 for i in range(length)]
            began = time.perf_counter()
            stream = engine.generate(prompt, params, request_id=f"f{length}-{turn}")
            times = [time.perf_counter() async for _ in stream]
            taken.append(1e3 * (times[0] - began))
        rows.append(Row(f"first of {length} tokens", taken[0], "ms", f"then {taken[1]:.1f} ms"))
    return rows


def memory_rows(options: argparse.Namespace, config: Config) -> list[Row]:
    """What the plan foresees beside weights and KV, and what was really taken at the most."""
    spec, max_running = qwen3_spec(options.layers), config.engine.max_running_requests
    page_tokens = config.engine.page_size
    work = footprint.cuda_workspace(spec, 2, max_running=max_running, page_tokens=page_tokens)
    held = footprint.weights(spec, 2)
    kv_bytes = bytes_per_token(spec.kv_layers(), torch.bfloat16) * _KV_TOKENS
    planned = (
        work.fixed_bytes
        + work.token_bytes * options.prefill
        + work.context_bytes * _CONTEXT
        + footprint.cuda_slot_bytes(spec, 2) * max_running
        + footprint.cuda_graph_bytes(spec, 2, max_running, is_eager=options.eager)
    )
    known = held.dense_bytes + held.expert_bytes + kv_bytes
    free, total = torch.cuda.mem_get_info()
    return [
        Row("planned beside weights and KV", planned / 1e9, "GB"),
        Row("  allocated at most", (torch.cuda.max_memory_allocated() - known) / 1e9, "GB"),
        Row("  held by the allocator", (torch.cuda.memory_reserved() - known) / 1e9, "GB"),
        Row("  gone from the GPU", (total - free - known) / 1e9, "GB", "reserve 1.07 GB on top"),
    ]


async def fairness_rows(engine: AsyncEngine, prompt_tokens: int) -> list[Row]:
    """A running stream's longest gap while a long prompt is computed."""
    is_running, long_done = asyncio.Event(), asyncio.Event()
    gaps: list[float] = []

    async def stream() -> None:
        params = SamplingParams(max_tokens=20000, temperature=0.0, ignore_eos=True)
        last = 0.0
        async for _ in engine.generate([5] * 64, params, request_id="stream"):
            now = time.perf_counter()
            if last:
                gaps.append(1e3 * (now - last))
            last = now
            if len(gaps) == 20:
                is_running.set()
            if long_done.is_set():
                break

    async def long() -> float:
        await is_running.wait()
        gaps.clear()
        prompt = [(11 * i) % 250 for i in range(prompt_tokens)]
        params = SamplingParams(max_tokens=1, temperature=0.0)
        began = time.perf_counter()
        async for _ in engine.generate(prompt, params, request_id="long"):
            pass
        long_done.set()
        return time.perf_counter() - began

    _, seconds = await asyncio.gather(stream(), long())
    return [
        Row(f"longest gap beside {prompt_tokens} tokens", max(gaps), "ms"),
        Row("  that prompt's time to first token", 1e3 * seconds, "ms"),
    ]


async def measure(options: argparse.Namespace) -> None:
    """Everything in one process and one table."""
    flags = {"engine.max_running_requests": 8, "engine.cuda_graphs": not options.eager}
    config = load_config(flags)
    rows: list[Row] = []
    async with serving(options, config) as bench:
        rows += await first_rows(bench.engine, [61, 83, 147, 500, 1111, 2067, 5000, 8211])
        for streams in (1, 4, 8):
            rows += await decode_rows(bench.engine, streams, 256)
        for command in options.client:
            process = await asyncio.create_subprocess_exec(
                *shlex.split(command.format(url=bench.url)), stdout=asyncio.subprocess.PIPE
            )
            out, _ = await process.communicate()
            print(out.decode()[-2500:], flush=True)
        rows += await fairness_rows(bench.engine, 32000)
        rows += memory_rows(options, config)
        wake_ups = sorted(bench.runner.wake_ups_us())
        for share in (0.5, 0.99):
            value = wake_ups[int(share * len(wake_ups))]
            rows.append(Row(f"wake-up p{round(100 * share)}", value, "us"))
        lag = bench.state.loop_lag.figures()
        rows += [Row("loop lag p50", lag.p50_ms, "ms"), Row("loop lag p99", lag.p99_ms, "ms")]
        if options.profile:
            await profile(bench.engine)
    publish("gpu", rows, options.json, layers=options.layers, device=torch.cuda.get_device_name())


async def profile(engine: AsyncEngine) -> None:
    """Print where a decode step's GPU time goes."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as prof:
        await decode_rows(engine, 1, 40)
    print(prof.key_averages().table(sort_by="cuda_time_total", row_limit=16), flush=True)


def main() -> None:
    """Read the command line and measure."""
    sys.setswitchinterval(0.0002)  # as app.py does
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--prefill", type=int, default=8192, help="prompt tokens of one step")
    parser.add_argument("--gap-ms", type=float, default=100.0)
    parser.add_argument("--client", action="append", default=[], help="command with {url}")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
