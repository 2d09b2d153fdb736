"""Rows of `bench.kernels`: sampling, and the first and last node of a decode step."""

from __future__ import annotations

from typing import Any

import torch

from bench.row_configs import drawn
from bench.timing import Report, Work
from freetoken.kernels.embed_rows import embed_rows
from freetoken.kernels.publish_step import publish_step
from freetoken.kernels.sample_rows import SampleSettings, make_scratch, sample_rows

VOCAB = 151_936


def _settings(rows: int, temperature: float, top_k: int, top_p: float) -> SampleSettings:
    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    return SampleSettings(
        temperature=full(temperature, torch.float32),
        top_k=full(top_k, torch.int32),
        top_p=full(top_p, torch.float64),
        min_p=full(0.0, torch.float32),
        uniforms=torch.rand(rows, dtype=torch.float64, device="cuda"),
        repetition=full(1.0, torch.float32),
        presence=full(0.0, torch.float32),
        frequency=full(0.0, torch.float32),
        slots=full(-1, torch.int32),
        bias_rows=full(-1, torch.int32),
        outputs=torch.zeros(1, VOCAB, dtype=torch.int32, device="cuda"),
        in_prompt=torch.zeros(1, VOCAB, dtype=torch.bool, device="cuda"),
        bias=torch.zeros(1, VOCAB, device="cuda"),
    )


def bench_sample(report: Report) -> None:
    """Greedy, plain and filtered rows, over peaked and over flat logits."""
    kinds = {
        "greedy": (0.0, 0, 1.0, 3.0),
        "plain": (1.0, 0, 1.0, 3.0),
        "top_k 20 top_p .95": (0.6, 20, 0.95, 3.0),
        "top_p .9 peaked": (1.0, 0, 0.9, 5.0),
        "top_p .9 flat": (1.0, 0, 0.9, 1.0),
    }
    for rows in (1, 8):
        for name, (temperature, top_k, top_p, scale) in kinds.items():
            logits = torch.randn(rows, VOCAB, device="cuda") * scale
            settings = _settings(rows, temperature, top_k, top_p)
            ids = torch.empty(rows, dtype=torch.int64, device="cuda")
            sound = torch.empty(rows, dtype=torch.int8, device="cuda")
            scratch, draws = make_scratch(rows, VOCAB, ids.device), temperature > 0

            def launch(
                _config: Any,
                _turn: int,
                t: tuple[Any, ...] = (logits, settings, ids, sound, scratch, draws),
            ) -> None:
                logits, settings, ids, sound, scratch, draws = t
                sample_rows(logits, settings, ids=ids, is_sound=sound, scratch=scratch, draws=draws)

            in_torch = [lambda logits=logits: logits.argmax(-1)] if not draws else []
            work = Work("sample_rows", f"b{rows} {name}", 4 * rows * VOCAB, 0, 1, launch, in_torch)
            report.sweep(work, [None])


def bench_ends(report: Report) -> None:
    """embed_rows and publish_step, one sequence."""
    table, h = drawn(VOCAB, 2048), drawn(1, 2048)
    cos, sin = (torch.empty(1, 64, device="cuda") for _ in range(2))
    tokens = torch.zeros(1, dtype=torch.int64, device="cuda")
    frequencies, positions = torch.rand(64, device="cuda"), tokens + 100_000

    def embed(_config: Any, _turn: int) -> None:
        embed_rows(tokens, table, positions, frequencies, h=h, cos=cos, sin=sin)

    report.sweep(Work("embed_rows", "b1", 4 * 2048, 0, 1, embed), [None])
    last, slots = torch.zeros(8, dtype=torch.int64, device="cuda"), tokens.clone()
    is_sound = torch.ones(1, dtype=torch.int8, device="cuda")
    host_ids = torch.zeros(4, dtype=torch.int64, pin_memory=True)
    word = torch.zeros(1, dtype=torch.int64, pin_memory=True)

    def publish(_config: Any, turn: int) -> None:
        publish_step(
            tokens, is_sound, slots, last, number=turn + 1, host_ids=host_ids, host_word=word
        )

    report.sweep(Work("publish_step", "b1", 16, 0, 1, publish), [None])
