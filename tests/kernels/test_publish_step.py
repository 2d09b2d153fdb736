"""The hand-over of a step's ids to the next step and to the CPU."""

from __future__ import annotations

import pytest
import torch

from freetoken.kernels.publish_step import publish_step, reference


@pytest.mark.parametrize("rows", [0, 1, 5, 40], ids=lambda n: f"rows={n}")
def test_published_ids_are_those_sampled(rows: int, device: torch.device) -> None:
    """An id lost or in another slot, or the word written with nothing behind it."""
    draw = torch.Generator().manual_seed(rows)
    pin = device.type == "cuda"
    ids = torch.randint(0, 2**40, (rows,), generator=draw).to(device)
    is_sound = (torch.rand(rows, generator=draw) < 0.7).to(torch.int8).to(device)
    slots = torch.randperm(64, generator=draw)[:rows].to(device)
    last_ids = torch.full((64,), 7, device=device)
    host_ids = torch.full((64,), -5, pin_memory=pin)
    word = torch.zeros(1, dtype=torch.int64, pin_memory=pin)
    wanted_last = last_ids.clone()
    wanted = reference(ids, is_sound, slots, wanted_last)
    publish_step(
        ids, is_sound, slots, last_ids, number=12345678901, host_ids=host_ids, host_word=word
    )
    if pin:
        torch.cuda.current_stream().synchronize()
    assert word.item() == 12345678901
    assert host_ids[:rows].tolist() == wanted.tolist()
    assert host_ids[rows:].tolist() == [-5] * (64 - rows)
    assert last_ids.tolist() == wanted_last.tolist()
