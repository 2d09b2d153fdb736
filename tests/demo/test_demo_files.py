"""The real demo files. `demo_paths` is the fixture that finds them in the cache or fetches them."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.functional import silu

from freetoken.checkpoint.demo import DENSE_SHA256, RECIPE, DemoPaths
from freetoken.checkpoint.gguf import open_gguf

pytestmark = [pytest.mark.demo, pytest.mark.limit(60)]

MOE_SHA256 = "796cc81bed53b4f67d3b523b73977f6e1c300324335fbee7a2e9d5006115bfe5"
"""Of the recipe's revision 1: same input and recipe give the same bytes on every machine."""


def test_real_files_have_their_checksums(demo_paths: DemoPaths) -> None:
    """Catches a conversion that depends on the machine, or a recipe changed under its old name."""
    for path, want in ((demo_paths.dense, DENSE_SHA256), (demo_paths.moe, MOE_SHA256)):
        with path.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == want


def test_real_model_says_where_it_comes_from(demo_paths: DemoPaths) -> None:
    """Catches a lost licence, and metadata that a Mixtral-form loader needs."""
    moe = open_gguf(demo_paths.moe)
    assert moe.metadata["general.license"] == "apache-2.0"
    assert moe.metadata["general.description"] == RECIPE.note
    assert moe.metadata["llama.expert_count"] == 8
    assert moe.metadata["llama.expert_used_count"] == 2
    assert moe.tensors["blk.29.ffn_down_exps.weight"].shape == (8, 576, 1536)
    assert moe.tensors["blk.29.ffn_down_exps.weight"].format == "Q4_1"
    assert moe.tensors["blk.29.ffn_gate_inp.weight"].shape == (8, 576)
    moe.close()


@pytest.mark.parametrize("layer", [0, 17, 29])
def test_real_experts_compute_the_dense_function(demo_paths: DemoPaths, layer: int) -> None:
    """Catches real weights that came apart: gate of one expert with down of another included."""
    dense, moe = open_gguf(demo_paths.dense), open_gguf(demo_paths.moe)
    name = f"blk.{layer}.ffn_"
    x = torch.randn(8, 576, generator=torch.Generator().manual_seed(layer)).double()
    gate, up, down = (
        dense.read(f"{name}{part}.weight", torch.float64) for part in ("gate", "up", "down")
    )
    want = (silu(x @ gate.T) * (x @ up.T)) @ down.T
    gates, ups, downs = (
        moe.read(f"{name}{part}_exps.weight", torch.float64) for part in ("gate", "up", "down")
    )
    for expert in range(8):
        inner = silu(x @ gates[expert].T) * (x @ ups[expert].T)
        assert torch.allclose(inner @ downs[expert].T, want, rtol=1e-9, atol=1e-12)
        mixed = inner @ downs[(expert + 1) % 8].T
        assert (mixed - want).norm() > 0.1 * want.norm()
    dense.close()
    moe.close()


def test_real_model_is_read_whole_from_two_threads(demo_paths: DemoPaths) -> None:
    """Catches a tensor of the real file that cannot be read, or holds no numbers."""
    moe = open_gguf(demo_paths.moe)

    def count(name: str) -> int:
        tensor = moe.read(name, torch.bfloat16)
        assert torch.isfinite(tensor).all()
        return tensor.numel()

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(count, moe.tensors)) == 692_036_928
    moe.close()
