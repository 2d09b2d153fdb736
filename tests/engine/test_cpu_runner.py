"""The whole engine on a tiny model: scheduler, runner thread, KV pages and sampler together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from freetoken.engine.cpu_runner import CpuRunner
from freetoken.engine.engine import AsyncEngine
from freetoken.errors import DeviceError
from freetoken.kvcache.pool import KvPool
from freetoken.layers.step import StepInput
from freetoken.models.decoder import Decoder
from freetoken.types import SamplingParams
from tests.engine.manual import collect, is_all_returned, running, settle
from tests.models.oracle import NEW, Oracle, build
from tests.models.paged import opened

PAGE = 4
GREEDY = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Decoder]:
    """A tiny Mixture-of-Experts and its own library's answer."""
    torch.set_num_threads(1)
    oracle = build("mixtral", tmp_path_factory.mktemp("mixtral"))
    return oracle, opened(oracle.folder)


def play(
    decoder: Decoder,
    talk: Callable[[AsyncEngine], Awaitable[Any]],
    *,
    pages: int = 64,
    **limits: int,
) -> Any:
    """Run `talk` against an engine on `decoder`; afterwards every page must be back."""

    async def main() -> Any:
        kv = KvPool(decoder.spec.kv_layers(), pages, PAGE, decoder.dtype)
        runner = CpuRunner(decoder, kv, max_running=8)
        async with running(runner, context=128, pages=pages, **limits) as engine:
            result = await talk(engine)
            while engine.statistics().steps_in_flight:
                await anext(engine.steps())
                await settle()
            assert is_all_returned(engine)
        assert not [t for t in threading.enumerate() if t.name == "freetoken-runner"]
        return result

    return asyncio.run(main())


async def answers(
    engine: AsyncEngine, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> list[list[int]]:
    """Replies to prompts sent at the same moment."""
    streams = [engine.generate(p, params, request_id=str(i)) for i, p in enumerate(prompts)]
    return [ids for ids, _, _ in await asyncio.gather(*(collect(s) for s in streams))]


@pytest.mark.parametrize("chunk", [3, 16, 512], ids=lambda n: f"chunk={n}")
def test_greedy_reply_equals_the_oracle_however_the_prompt_is_cut(
    mixtral: tuple[Oracle, Decoder], chunk: int
) -> None:
    """Chunked prefill, or two steps in flight, change the text."""
    oracle, decoder = mixtral
    got = play(decoder, lambda e: answers(e, [oracle.prompt]), max_prefill_tokens=chunk)
    assert got == [oracle.greedy]


def test_eight_concurrent_replies_equal_each_one_alone(mixtral: tuple[Oracle, Decoder]) -> None:
    """Neighbours in a batch, shared prefixes or preemption change the text."""
    oracle, decoder = mixtral
    prompts = [oracle.prompt[: 12 + i] + [i + 1] * (i % 3 + 1) for i in range(8)]
    alone = [play(decoder, lambda e, p=p: answers(e, [p]))[0] for p in prompts]
    assert play(decoder, lambda e: answers(e, prompts), max_prefill_tokens=7) == alone
    assert play(decoder, lambda e: answers(e, prompts), pages=36) == alone
    assert play(decoder, lambda e: answers(e, prompts), reuse=False) == alone


def test_cached_prefix_gives_the_same_reply_as_a_cold_one(mixtral: tuple[Oracle, Decoder]) -> None:
    """KV taken from the tree belongs to other tokens or positions."""
    oracle, decoder = mixtral

    async def talk(engine: AsyncEngine) -> list[tuple[list[int], int]]:
        said: list[tuple[list[int], int]] = []
        for name in ("cold", "warm"):
            ids, _, cached = await collect(engine.generate(oracle.prompt, GREEDY, request_id=name))
            said.append((ids, cached))
        return said

    cold, warm = play(decoder, talk)
    assert cold == (oracle.greedy, 0)
    assert warm == (oracle.greedy, len(oracle.prompt) - PAGE)


def test_short_long_short_leaves_nothing_behind(mixtral: tuple[Oracle, Decoder]) -> None:
    """R29: after one long request all later ones answer wrongly."""
    oracle, decoder = mixtral

    async def talk(engine: AsyncEngine) -> list[list[int]]:
        long = (oracle.prompt * 5)[:100]
        return [(await answers(engine, [p]))[0] for p in (oracle.prompt, long, oracle.prompt)]

    first, _, third = play(decoder, talk, pages=33)
    assert first == third == oracle.greedy


def test_seeded_reply_is_the_same_alone_and_in_a_crowd(mixtral: tuple[Oracle, Decoder]) -> None:
    """A random choice that depends on neighbours, or a seed that is not one."""
    oracle, decoder = mixtral
    params = SamplingParams(
        max_tokens=20, temperature=1.0, top_p=0.95, seed=7, frequency_penalty=0.5
    )
    alone = play(decoder, lambda e: answers(e, [oracle.prompt], params))[0]
    crowd = [oracle.prompt, *([i, i + 1, i + 2] for i in range(6))]
    assert play(decoder, lambda e: answers(e, crowd, params))[0] == alone
    other = SamplingParams(max_tokens=20, temperature=1.0, seed=8)
    assert play(decoder, lambda e: answers(e, [oracle.prompt], other))[0] != alone


def test_logprobs_are_those_of_the_oracle(mixtral: tuple[Oracle, Decoder]) -> None:
    """Log-probabilities of another position, or changed by sampling settings."""
    oracle, decoder = mixtral

    async def talk(engine: AsyncEngine) -> list[tuple[int, float, tuple[tuple[int, float], ...]]]:
        params = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2)
        stream = engine.generate(oracle.prompt, params, request_id="a")
        return [(p.token, p.logprob, p.top) async for c in stream for p in c.logprobs or []]

    got = play(decoder, talk)
    wanted = oracle.logits[-1].log_softmax(-1).topk(2)
    assert [token for token, _, _ in got] == oracle.greedy[:3]
    assert [token for token, _ in got[0][2]] == wanted.indices.tolist()
    assert got[0][1] == pytest.approx(wanted.values[0].item(), abs=1e-4)
    assert [value for _, value in got[0][2]] == pytest.approx(wanted.values.tolist(), abs=1e-4)


def test_failing_forward_pass_is_a_device_error_with_its_cause(
    mixtral: tuple[Oracle, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in the runner thread leaves every request waiting."""
    oracle, decoder = mixtral

    def fail(_self: Decoder, _step: StepInput, _kv: KvPool) -> torch.Tensor:
        raise RuntimeError("out of memory in layer 3")

    async def talk() -> None:
        kv = KvPool(decoder.spec.kv_layers(), 16, PAGE, decoder.dtype)
        async with running(CpuRunner(decoder, kv, max_running=2), context=60) as engine:
            with pytest.raises(DeviceError, match=r"step 1 failed.*out of memory in layer 3"):
                await answers(engine, [oracle.prompt])

    monkeypatch.setattr(Decoder, "forward", fail)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(talk())
    assert caught.group_contains(DeviceError, match="step 1 failed")
