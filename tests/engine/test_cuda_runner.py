"""The whole engine on a GPU with tiny models: graphs and eager, alone and in a crowd."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from freetoken.engine.cuda_runner import CudaRunner
from freetoken.engine.engine import AsyncEngine
from freetoken.kvcache.pool import KvPool
from freetoken.models.decoder import Decoder
from freetoken.models.load import load_decoder, open_checkpoint
from freetoken.types import SamplingParams
from tests.engine.manual import collect, is_all_returned, running, settle
from tests.models.oracle import CASES, NEW, Oracle, build

pytestmark = pytest.mark.gpu

PAGE = 16
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)


def loaded(oracle: Oracle, dtype: torch.dtype = torch.float32) -> Decoder:
    """The checkpoint on the GPU."""
    checkpoint = open_checkpoint(oracle.folder)
    device = torch.device("cuda")
    decoder = load_decoder(checkpoint, dtype, device, lambda _done, _total: None)
    checkpoint.close()
    return decoder


def play(
    decoder: Decoder,
    talk: Callable[[AsyncEngine], Awaitable[Any]],
    *,
    pages: int = 64,
    is_eager: bool = False,
    **limits: int,
) -> Any:
    """Run `talk` against an engine on the GPU; afterwards every page must be back."""

    async def main() -> Any:
        kv = KvPool(decoder.spec.kv_layers(), pages, PAGE, decoder.dtype, decoder.device)
        runner = CudaRunner(decoder, kv, 8, 8, is_eager=is_eager)
        async with running(runner, context=128, pages=pages, page_tokens=PAGE, **limits) as engine:
            await asyncio.to_thread(engine.warm)
            result = await talk(engine)
            while engine.statistics().steps_in_flight:
                await anext(engine.steps())
                await settle()
            assert is_all_returned(engine)
        return result

    return asyncio.run(main())


async def answers(
    engine: AsyncEngine, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> list[list[int]]:
    """Replies to prompts sent at the same moment."""
    streams = [engine.generate(p, params, request_id=str(i)) for i, p in enumerate(prompts)]
    return [ids for ids, _, _ in await asyncio.gather(*(collect(s) for s in streams))]


@pytest.fixture(scope="module")
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """A tiny model of the family, with head and hidden sizes that the kernels' tiles allow."""
    settings = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 16,
        "intermediate_size": 48,
    }
    name: str = request.param
    return build(name, tmp_path_factory.mktemp(name), **settings)


@pytest.mark.parametrize("oracle", sorted(CASES), indirect=True)
def test_greedy_reply_equals_transformers(oracle: Oracle) -> None:
    """A kernel, a pointer table or a captured address is wrong for this family."""
    decoder = loaded(oracle)
    assert play(decoder, lambda e: answers(e, [oracle.prompt])) == [oracle.greedy]
    assert play(decoder, lambda e: answers(e, [oracle.prompt]), is_eager=True) == [oracle.greedy]
    cut = play(decoder, lambda e: answers(e, [oracle.prompt]), max_prefill_tokens=5)
    assert cut == [oracle.greedy]


@pytest.mark.parametrize("oracle", ["qwen3_moe"], indirect=True)
def test_crowd_equals_alone_and_cold_equals_cached(oracle: Oracle) -> None:
    """Neighbours, shared pages or preemption change the text."""
    decoder = loaded(oracle)
    prompts = [oracle.prompt[: 12 + i] + [i + 1] * (i % 3 + 1) for i in range(8)]
    alone = [play(decoder, lambda e, p=p: answers(e, [p]))[0] for p in prompts]
    assert play(decoder, lambda e: answers(e, prompts), max_prefill_tokens=7) == alone
    assert play(decoder, lambda e: answers(e, prompts), pages=12) == alone

    async def twice(engine: AsyncEngine) -> list[list[int]]:
        return [(await answers(engine, [oracle.prompt]))[0] for _ in range(2)]

    assert play(decoder, twice) == [oracle.greedy] * 2


@pytest.mark.parametrize("oracle", ["qwen3_moe"], indirect=True)
def test_seeded_reply_is_the_same_alone_and_in_a_crowd(oracle: Oracle) -> None:
    """A random choice that depends on neighbours."""
    decoder = loaded(oracle)
    params = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.95, seed=7, logprobs=2)
    alone = play(decoder, lambda e: answers(e, [oracle.prompt], params))[0]
    crowd = [oracle.prompt, *([i, i + 1, i + 2] for i in range(6))]
    assert play(decoder, lambda e: answers(e, crowd, params))[0] == alone


@pytest.mark.parametrize("oracle", ["qwen3_moe"], indirect=True)
def test_random_aborts_leave_pages_whole(oracle: Oracle) -> None:
    """Requests that end at any moment leak pages or slots, or stop the others."""
    decoder = loaded(oracle, torch.bfloat16)

    async def client(engine: AsyncEngine, number: int) -> None:
        prompt = [1 + (number * 7 + i) % 90 for i in range(5 + number % 40)]
        stream = engine.generate(prompt, GREEDY, request_id=str(number))
        taken = 0
        async for _ in stream:
            taken += 1
            if taken > number % 9:
                break
        await stream.aclose()

    async def crowd(engine: AsyncEngine) -> None:
        for first in range(0, 1000, 40):
            await asyncio.gather(*(client(engine, first + i) for i in range(40)))

    play(decoder, crowd, pages=40)
