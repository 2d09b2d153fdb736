"""The real demo model, dense and as experts, against transformers. Needs it in the cache: after
`make smoke`.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
import transformers

import freetoken
from freetoken.checkpoint.demo import DemoPaths

pytestmark = [pytest.mark.demo, pytest.mark.limit(900)]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
)
NEW = 64


@pytest.fixture(scope="module")
def oracle(demo_paths: DemoPaths) -> list[list[int]]:
    """What transformers says in fp32, prompt and reply as ids."""
    torch.set_num_threads(2)
    folder, file = demo_paths.dense.parent, demo_paths.dense.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager"
    )
    said: list[list[int]] = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        said.append(out[0].tolist())
    return said


async def replies(path: Path) -> list[list[int]]:
    """Our greedy ids for every prompt, sent at once; each stands behind its prompt's own ids."""

    async def reply(engine: freetoken.Engine, prompt: str) -> list[int]:
        ids: list[int] = []
        stream = engine.generate(prompt, max_tokens=NEW, temperature=0.0, ignore_eos=True)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                ids += delta.ids
        return ids

    async with freetoken.Engine.open(str(path), num_tokens=1024, dtype="float32") as engine:
        return list(await asyncio.gather(*(reply(engine, p) for p in PROMPTS)))


@pytest.mark.parametrize("form", ["dense", "moe"])
def test_demo_says_what_transformers_says(
    form: str, demo_paths: DemoPaths, oracle: list[list[int]]
) -> None:
    """A wrong permutation, rope, tokenizer or upcycling still speaks, but says something else."""
    said = asyncio.run(replies(getattr(demo_paths, form)))
    assert said == [ids[-NEW:] for ids in oracle]
