"""The same models with the native CPU operations: they must agree with torch and transformers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from freetoken import native
from freetoken.layers.cpu import CpuKernels, cpu_kernels
from freetoken.models.decoder import Decoder
from freetoken.native import Native
from tests.models.oracle import NEW, Oracle
from tests.models.paged import Loop, Sequence, opened


@pytest.fixture(scope="module")
def library() -> Iterator[Native]:
    """Open the library with two threads."""
    opened_library = native.load(threads=2)
    if opened_library is None:
        pytest.skip("the native library is not built: no C++ compiler")
    with opened_library:
        yield opened_library


@pytest.fixture(scope="module")
def fast(oracle: Oracle, library: Native) -> Decoder:
    """Decode the oracle's checkpoint with native code, fp32."""
    return opened(oracle.folder, native=library)


def test_native_prefill_equals_transformers(oracle: Oracle, fast: Decoder) -> None:
    """Catches native products that read a matrix or an expert in another order than torch does."""
    (logits,) = Loop(fast).step([(Sequence(), oracle.prompt)], every_row=True)
    torch.testing.assert_close(logits, oracle.logits, atol=1e-4, rtol=0.0)


def test_native_decode_equals_transformers(oracle: Oracle, fast: Decoder) -> None:
    """Catches native attention over a wrong page, window or length."""
    loop, sequence = Loop(fast), Sequence()
    rows = [loop.step([(sequence, [token])])[0] for token in oracle.prompt]
    torch.testing.assert_close(torch.cat(rows), oracle.logits, atol=1e-4, rtol=0.0)
    assert Loop(fast).greedy([oracle.prompt], NEW) == [oracle.greedy]


def test_native_mixed_step_equals_torch(oracle: Oracle, fast: Decoder, decoder: Decoder) -> None:
    """Catches rows lost between the two attentions when a step has prefill and decode rows."""
    prompt = oracle.prompt
    results: list[torch.Tensor] = []
    for model in (fast, decoder):
        loop = Loop(model)
        first, second, third = (Sequence() for _ in range(3))
        loop.step([(first, prompt[:11]), (second, prompt[:20]), (third, prompt[:2])])
        runs = [(first, prompt[11:12]), (second, prompt[20:]), (third, prompt[2:3])]
        results.append(torch.cat(loop.step(runs, every_row=True)))
    torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=0.0)


def test_native_batched_greedy_equals_alone(oracle: Oracle, fast: Decoder) -> None:
    """Catches neighbours that change a text when decode rows share native calls."""
    prompts = [oracle.prompt, oracle.prompt[:3], oracle.prompt[::-1], [7]]
    together = Loop(fast).greedy(prompts, NEW)
    assert together == [Loop(fast).greedy([prompt], NEW)[0] for prompt in prompts]


def test_native_bfloat16_stays_close_to_torch(oracle: Oracle, library: Native) -> None:
    """Catches a wrong element type: bf16 read as fp32 gives noise. Routers may flip: most rows."""
    rows: list[torch.Tensor] = []
    for native_library in (library, None):
        loop = Loop(opened(oracle.folder, torch.bfloat16, native_library))
        sequence = Sequence()
        cuts = range(0, len(oracle.prompt) + 1, 2)
        parts = [(sequence, oracle.prompt[start:end]) for start, end in pairwise(cuts)]
        rows.append(torch.cat([loop.step([part], every_row=True)[0] for part in parts]))
    assert torch.cosine_similarity(rows[0], rows[1]).median() > 0.999


@pytest.mark.parametrize(
    ("dtype", "device", "is_used"),
    [
        (torch.float32, "cpu", True),
        (torch.bfloat16, "cpu", True),
        (torch.float16, "cpu", False),
        (torch.float32, "cuda", False),
    ],
    ids=["fp32", "bf16", "fp16", "cuda"],
)
def test_native_is_used_where_it_can(
    dtype: torch.dtype, device: str, is_used: bool, library: Native
) -> None:
    """Catches native code called with a dtype or a device that it cannot read."""
    found = cpu_kernels(library, dtype, torch.device(device))
    assert isinstance(found, CpuKernels) == is_used
    assert cpu_kernels(None, dtype, torch.device(device)) is None
