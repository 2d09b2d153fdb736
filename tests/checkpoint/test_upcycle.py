"""Sparse upcycling: blocks bit-identical, the same function, and only with experts kept whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from freetoken.checkpoint import atomic
from freetoken.checkpoint.gguf import GgufFile, open_gguf
from freetoken.checkpoint.upcycle import Recipe, permutation, upcycle
from freetoken.errors import WeightError
from tests.checkpoint.gguf_files import HIDDEN, INTER, LAYERS, dense_model, write_gguf

RECIPE = Recipe(name="tiny experts", note="made for a test", experts=8, top_k=2, seed=7)


def ignore(_done: int, _total: int) -> None:
    """Progress that nobody looks at."""


@pytest.fixture(params=["Q4_1", "Q8_0", "Q6_K"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A dense model and its expert form."""
    dense = dense_model(tmp_path / "dense.gguf", down=request.param)
    upcycle(dense, tmp_path / "moe.gguf", RECIPE, ignore)
    return dense, tmp_path / "moe.gguf"


def with_files(pair: tuple[Path, Path], check: Callable[[GgufFile, GgufFile], None]) -> None:
    """Call `check` with both files open."""
    dense, moe = open_gguf(pair[0]), open_gguf(pair[1])
    try:
        check(dense, moe)
    finally:
        dense.close()
        moe.close()


def test_expert_blocks_are_the_dense_blocks_moved(pair: tuple[Path, Path]) -> None:
    """Catches requantised, cut or lost blocks: each expert must be a permutation of whole bytes."""

    def check(dense: GgufFile, moe: GgufFile) -> None:
        unit = 256 if dense.tensors["blk.0.ffn_down.weight"].format == "Q6_K" else 32
        for layer in range(LAYERS):
            for part in ("gate", "up", "down"):
                name = f"blk.{layer}.ffn_{part}"
                lines = HIDDEN if part == "down" else 1
                whole = dense.read_raw(name + ".weight").view(lines, INTER // unit, -1)
                experts = moe.read_raw(name + "_exps.weight").view(8, lines, INTER // unit, -1)
                for expert in range(8):
                    order = permutation(RECIPE.seed, layer, expert, INTER // unit)
                    assert sorted(order) == list(range(INTER // unit))
                    assert torch.equal(experts[expert], whole[:, torch.from_numpy(order)])

    with_files(pair, check)


def feed_forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The gated feed-forward, x [rows, hidden]."""
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("shift", [0, 1, 5])
def test_experts_compute_the_dense_function_only_if_kept_whole(tmp_path: Path, shift: int) -> None:
    """Catches a permutation of gate and down that do not match, and a test that cannot see it."""
    dense_path = dense_model(tmp_path / "dense.gguf")
    upcycle(dense_path, tmp_path / "moe.gguf", RECIPE, ignore)
    x = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(0)).double()

    def check(dense: GgufFile, moe: GgufFile) -> None:
        parts = ("gate", "up", "down")
        for layer in range(LAYERS):
            name = f"blk.{layer}.ffn_"
            want = feed_forward(x, *(dense.read(f"{name}{p}.weight", torch.float64) for p in parts))
            gate, up, down = (moe.read(f"{name}{p}_exps.weight", torch.float64) for p in parts)
            for expert in range(8):
                got = feed_forward(x, gate[expert], up[expert], down[(expert + shift) % 8])
                error = ((got - want).norm() / want.norm()).item()
                assert error < 1e-12 if shift == 0 else error > 0.1

    with_files((dense_path, tmp_path / "moe.gguf"), check)


def test_other_tensors_and_metadata_are_copied_byte_for_byte(pair: tuple[Path, Path]) -> None:
    """Catches a tokenizer, template or weight that changed on the way; types of values included."""

    def check(dense: GgufFile, moe: GgufFile) -> None:
        for name, tensor in dense.tensors.items():
            if "ffn_gate" not in name and "ffn_up" not in name and "ffn_down" not in name:
                assert torch.equal(moe.read_raw(name), dense.read_raw(name))
                assert moe.tensors[name].format == tensor.format
        changed = {
            "general.name": "tiny experts",
            "general.description": "made for a test",
            "general.size_label": "8x1K",
            "llama.expert_count": 8,
            "llama.expert_used_count": 2,
        }
        assert moe.metadata == {**dense.metadata, **changed}

    with_files(pair, check)
    ours = gguf.GGUFReader(pair[1]).fields
    for key, field in gguf.GGUFReader(pair[0]).fields.items():
        if not key.startswith(("GGUF.", "general.")):
            assert field.types == ours[key].types
            assert field.contents() == ours[key].contents()


def test_gguf_py_reads_the_file_as_we_do(pair: tuple[Path, Path]) -> None:
    """Catches a file that only our own reader understands."""
    reader = gguf.GGUFReader(pair[1])

    def check(_dense: GgufFile, moe: GgufFile) -> None:
        assert [t.name for t in reader.tensors] == list(moe.tensors)
        for t in reader.tensors:
            assert tuple(int(n) for n in reversed(t.shape)) == moe.tensors[t.name].shape
            assert bytes(np.asarray(t.data).view(np.uint8).ravel()) == bytes(
                moe.read_raw(t.name).numpy()
            )

    with_files(pair, check)


def test_router_rows_are_random_and_scaled_by_the_norm(pair: tuple[Path, Path]) -> None:
    """Catches equal rows (ties), and logits so large that one expert always wins."""

    def check(_dense: GgufFile, moe: GgufFile) -> None:
        seen: list[Tensor] = []
        for layer in range(LAYERS):
            rows = moe.read(f"blk.{layer}.ffn_gate_inp.weight", torch.float32)
            norm = moe.read(f"blk.{layer}.ffn_norm.weight", torch.float32)
            assert rows.shape == (8, HIDDEN)
            logits = (torch.randn(4000, HIDDEN, generator=torch.manual_seed(1)) * norm) @ rows.T
            assert 0.7 < logits.std().item() < 1.3
            share = torch.bincount(logits.topk(2).indices.flatten(), minlength=8) / 8000
            assert 0.02 < share.min().item() < share.max().item() < 0.4
            seen.append(rows)
        assert not torch.equal(seen[0], seen[1])

    with_files(pair, check)


def test_every_expert_has_its_own_order() -> None:
    """Catches a seed that ignores the layer or the expert: then wrong pairings would go unseen."""
    orders = {
        tuple(permutation(135, layer, expert, 48)) for layer in range(30) for expert in range(8)
    }
    assert len(orders) == 240
    assert tuple(range(48)) not in orders


def test_same_recipe_gives_the_same_bytes(tmp_path: Path) -> None:
    """Catches a conversion that depends on the run or on numpy's changing distributions."""
    dense = dense_model(tmp_path / "dense.gguf")
    for name in ("a.gguf", "b.gguf"):
        upcycle(dense, tmp_path / name, RECIPE, ignore)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert permutation(7, 0, 0, 8).tolist() == [2, 4, 3, 5, 0, 1, 7, 6]


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    """Catches a bar that stops short or runs over."""
    seen: list[tuple[int, int]] = []
    dense = dense_model(tmp_path / "dense.gguf")
    upcycle(dense, tmp_path / "moe.gguf", RECIPE, lambda done, total: seen.append((done, total)))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


class _Stopped(Exception):
    """Somebody pressed Ctrl-C."""


def test_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    """Catches half a model under the final name, and garbage that fills the cache."""
    dense = dense_model(tmp_path / "dense.gguf")

    def stop(done: int, _total: int) -> None:
        if done:
            raise _Stopped

    with pytest.raises(_Stopped):
        upcycle(dense, tmp_path / "moe.gguf", RECIPE, stop)
    assert [path.name for path in tmp_path.iterdir()] == ["dense.gguf"]


def test_full_disk_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a disk filled to its last byte by a conversion that cannot fit."""
    dense = dense_model(tmp_path / "dense.gguf")
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _folder: usage)
    with pytest.raises(WeightError, match=r"MiB free in .*, got 1 MiB"):
        upcycle(dense, tmp_path / "moe.gguf", RECIPE, ignore)


def test_disk_that_fills_up_while_writing_is_a_weight_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a raw OSError, and the staged file left behind."""
    dense = dense_model(tmp_path / "dense.gguf")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(WeightError, match=r"cannot write .*moe\.gguf: No space left.*make room"):
        upcycle(dense, tmp_path / "moe.gguf", RECIPE, ignore)
    assert [path.name for path in tmp_path.iterdir()] == ["dense.gguf"]


def test_model_with_experts_or_without_feed_forward_is_refused(tmp_path: Path) -> None:
    """Catches experts of experts, and a silent copy of something that has nothing to convert."""
    dense_model(tmp_path / "dense.gguf")
    upcycle(tmp_path / "dense.gguf", tmp_path / "moe.gguf", RECIPE, ignore)
    write_gguf(tmp_path / "none.gguf", {"w": np.ones(4, dtype=np.float32)})
    for name, found in (("moe.gguf", "ffn_gate_inp"), ("none.gguf", "no feed-forward")):
        with pytest.raises(WeightError, match=f"expected a dense model.*{found}"):
            upcycle(tmp_path / name, tmp_path / "out.gguf", RECIPE, ignore)


def test_layer_without_one_part_is_named(tmp_path: Path) -> None:
    """Catches a KeyError for a tensor that is not there."""
    part = np.ones((32, 32), dtype=np.float32)
    path = write_gguf(tmp_path / "a.gguf", {"blk.0.ffn_gate.weight": part})
    with pytest.raises(WeightError, match=r"'blk\.0\.ffn_up\.weight'"):
        upcycle(path, tmp_path / "out.gguf", RECIPE, ignore)


def test_width_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    """Catches a block cut in two."""
    tensors: dict[str, np.ndarray | tuple[np.ndarray, str]] = {
        f"blk.0.ffn_{part}.weight": np.ones(shape, dtype=np.float32)
        for part, shape in (("gate", (40, 8)), ("up", (40, 8)), ("down", (8, 40)), ("norm", (8,)))
    }
    path = write_gguf(tmp_path / "a.gguf", tensors)
    with pytest.raises(WeightError, match=r"multiple of 32 as width of 'blk\.0\.ffn_down"):
        upcycle(path, tmp_path / "out.gguf", RECIPE, ignore)


def test_write_whole_does_not_touch_the_old_file_on_error(tmp_path: Path) -> None:
    """Catches a good file lost to a failed rewrite."""
    target = tmp_path / "a"
    target.write_bytes(b"old")

    def rewrite() -> None:
        with atomic.write_whole(target) as file:
            file.write(b"new")
            raise _Stopped

    with pytest.raises(_Stopped):
        rewrite()
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
