"""sample_rows against its own reference and against the engine's sampler on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from freetoken.engine.penalties import RowSettings
from freetoken.engine.sampler import Sampler
from freetoken.kernels import sample_rows
from freetoken.kernels.sample_rows import SampleSettings
from tests.kernels.interpreter import scalar_bounds  # noqa: F401

VOCAB = 1100


@pytest.fixture(autouse=True)
def _short_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sort few tokens where the interpreter does it, one comparison after another."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(sample_rows, "_SORTED", 128)


def settings_of(
    rows: int, device: torch.device, vocab: int = VOCAB, **values: Any
) -> SampleSettings:
    """Make settings that change nothing, with `values` for all rows (a number) or each (a list)."""
    kinds = {
        "temperature": (torch.float32, 1.0),
        "top_k": (torch.int32, 0),
        "top_p": (torch.float64, 1.0),
        "min_p": (torch.float32, 0.0),
        "uniforms": (torch.float64, 0.5),
        "repetition": (torch.float32, 1.0),
        "presence": (torch.float32, 0.0),
        "frequency": (torch.float32, 0.0),
        "slots": (torch.int32, -1),
        "bias_rows": (torch.int32, -1),
    }
    tensors = {}
    for name, (dtype, default) in kinds.items():
        value = values.pop(name, default)
        value = value if isinstance(value, list) else [value] * rows
        tensors[name] = torch.tensor(value, dtype=dtype, device=device)
    tables = {
        "outputs": torch.zeros(rows, vocab, dtype=torch.int32, device=device),
        "in_prompt": torch.zeros(rows, vocab, dtype=torch.bool, device=device),
        "bias": torch.zeros(1, vocab, device=device),
    }
    return SampleSettings(**tensors, **(tables | values))


def sample(logits: Tensor, settings: SampleSettings, **options: Any) -> tuple[Tensor, Tensor]:
    """Run twice over poisoned outputs; the scratch must come back clean."""
    rows, vocab = logits.shape
    scratch = sample_rows.make_scratch(rows, vocab, logits.device)
    results = []
    for _ in range(2):
        again = replace(settings, outputs=settings.outputs.clone())
        ids = torch.full((rows,), -1, dtype=torch.int64, device=logits.device)
        sound = torch.full((rows,), -1, dtype=torch.int8, device=logits.device)
        sample_rows.sample_rows(logits, again, ids=ids, is_sound=sound, scratch=scratch, **options)
        results.append((ids, sound))
        assert not scratch.counters[:, :3].any()
    assert torch.equal(results[0][0], results[1][0])
    settings.outputs.copy_(again.outputs)
    return results[0]


def logits_of(rows: int, device: torch.device, *, scale: float = 3.0, vocab: int = VOCAB) -> Tensor:
    """Draw logits."""
    generator = torch.Generator().manual_seed(17)
    return (torch.randn(rows, vocab, generator=generator) * scale).to(device)


def check(logits: Tensor, settings: SampleSettings) -> None:
    """Compare ids and soundness with the reference."""
    expected, sound = sample_rows.reference(
        logits, replace(settings, outputs=settings.outputs.clone())
    )
    ids, is_sound = sample(logits, settings)
    assert torch.equal(is_sound != 0, sound)
    assert torch.equal(ids[sound], expected[sound]), (ids.tolist(), expected.tolist())


@pytest.mark.parametrize("vocab", [1, 31, 1024, 1100])
def test_greedy_lowest_of_equals(vocab: int, device: torch.device) -> None:
    """Caught: another order of equal logits than on the CPU; the last, ragged block left out."""
    logits = logits_of(3, device, vocab=vocab)
    logits[1] = 0.0
    logits[2, vocab - 1] = 50.0
    if vocab > 1090:
        logits[0, [1090, 40]] = 60.0
    ids, sound = sample(logits, settings_of(3, device, vocab, temperature=0.0), draws=False)
    assert ids.tolist() == logits.argmax(-1).tolist()
    assert sound.tolist() == [1, 1, 1]


def test_not_sound_rows_are_told(device: torch.device) -> None:
    """Caught: text made of NaN, and a row that spoils its neighbours."""
    logits = logits_of(5, device)
    logits[0, 1090], logits[1, 3], logits[2] = float("nan"), float("inf"), float("-inf")
    settings = settings_of(
        5, device, temperature=[0.0, 1.0, 1.0, 0.0, 1.0], top_p=[1.0, 0.5, 1.0, 1.0, 0.9]
    )
    _, sound = sample(logits, settings)
    assert sound.tolist() == [0, 0, 0, 1, 1]


DRAWS = {
    "plain": {},
    "hot": {"temperature": 3.0},
    "min-p": {"min_p": 0.2},
    "top-k": {"top_k": 20},
    "top-k-1": {"top_k": 2, "top_p": 0.01},
    "top-p": {"top_p": 0.9},
    "top-p-flat": {"top_p": 0.999, "temperature": 8.0},
    "top-p-0": {"top_p": 0.0},
    "all": {"top_k": 50, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
    "min-p-in-top-k": {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.9},
    "top-p-min-p": {"top_p": 0.95, "min_p": 0.3},
    "top-k-flat": {"top_k": 900, "temperature": 20.0},
}


@pytest.mark.parametrize("sorted_tokens", [128, 16], ids=["sorted", "bisected"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draw_equals_reference(
    draw: dict[str, float],
    sorted_tokens: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Caught: a boundary of top_k, top_p or min_p one token off, or another order of drawing."""
    monkeypatch.setattr(sample_rows, "_SORTED", sorted_tokens)
    uniforms = [0.0, 0.31, 0.77, 1 - 2**-53]
    check(logits_of(4, device, scale=5.0), settings_of(4, device, uniforms=uniforms, **draw))


@pytest.mark.parametrize("sorted_tokens", [128, 16], ids=["sorted", "bisected"])
def test_draw_among_equals(
    sorted_tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caught: equal tokens taken together or left out together at the k-th place."""
    monkeypatch.setattr(sample_rows, "_SORTED", sorted_tokens)
    logits = torch.zeros(3, VOCAB, device=device)
    logits[1, 700:] = -0.0
    logits[2, 900:] = 1.0
    check(logits, settings_of(3, device, top_k=40, uniforms=[0.0, 0.49, 0.999]))
    check(logits, settings_of(3, device, top_p=0.25, uniforms=[0.0, 0.49, 0.999]))


def test_penalties_bias_and_mask(device: torch.device) -> None:
    """Caught: an order of changes other than the sampler's, a slot or bias row of another row, an unused bit."""
    logits = logits_of(4, device)
    settings = settings_of(
        4,
        device,
        temperature=[0.0, 0.7, 1.0, 0.0],
        top_p=[1.0, 0.9, 1.0, 1.0],
        repetition=[1.3, 0.8, 1.0, 2.0],
        presence=[0.5, -0.5, 0.0, 9.0],
        frequency=[0.1, 0.4, 0.0, 9.0],
        slots=[2, 0, -1, -1],
        bias_rows=[-1, 1, 0, -1],
        bias=torch.stack([logits_of(1, device)[0].flip(0), logits_of(1, device)[0] * -1]),
        allowed=torch.randint(
            -(2**31), 2**31, (4, -(-VOCAB // 32)), generator=torch.Generator().manual_seed(1)
        ).to(device, torch.int32),
    )
    settings.outputs[:, ::3] = 2
    settings.in_prompt[:, ::5] = True
    before = settings.outputs.clone()
    check(logits, settings)
    counted = (settings.outputs - before).sum(1)
    assert counted.tolist() == [1, 0, 1, 0]


def test_same_as_engine_sampler(device: torch.device) -> None:
    """Caught: a seed that says something else on a GPU than on a CPU."""
    logits = logits_of(6, device)
    values = {
        "temperature": [0.0, 1.0, 0.7, 1.3, 0.9, 1.0],
        "top_k": [0, 0, 20, 0, 40, 0],
        "top_p": [1.0, 1.0, 1.0, 0.9, 0.8, 0.97],
        "min_p": [0.0, 0.01, 0.0, 0.05, 0.02, 0.0],
    }
    uniforms = [0.1, 0.2, 0.45, 0.6, 0.85, 0.97]
    ids, sound = sample(logits, settings_of(6, device, uniforms=uniforms, **values))
    sampler = Sampler(8, VOCAB, torch.device("cpu"))
    no_more = (1.0, 0.0, 0.0, False, None, None, None)
    rows = [RowSettings(*row, *no_more) for row in zip(*values.values(), strict=True)]
    expected = sampler.sample(
        logits.cpu(), rows, list(range(6)), torch.tensor(uniforms, dtype=torch.float64)
    )
    assert ids.tolist() == expected.ids.tolist()
    assert bool(sound.all())


def test_alone_and_in_batch_same_token(device: torch.device) -> None:
    """Caught: a draw that depends on the neighbours' settings."""
    logits = logits_of(3, device)
    values = {"top_p": [0.9, 1.0, 0.6], "top_k": [0, 0, 9], "uniforms": [0.3, 0.6, 0.9]}
    together, _ = sample(logits, settings_of(3, device, **values))
    for row in range(3):
        one = {name: [value[row]] for name, value in values.items()}
        alone, _ = sample(logits[row : row + 1], settings_of(1, device, **one))
        assert alone[0] == together[row]


def test_no_rows(device: torch.device) -> None:
    """Caught: a launch with an empty grid."""
    ids, sound = sample(torch.empty(0, VOCAB, device=device), settings_of(0, device))
    assert ids.shape == sound.shape == (0,)


@pytest.mark.gpu
@pytest.mark.limit(300)
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("scale", [0.5, 3.0], ids=["flat", "peaked"])
def test_draw_full_size(draw: dict[str, float], scale: float, device: torch.device) -> None:
    """Caught: races between programs, sums over a whole vocabulary."""
    vocab, uniforms = 151_936, torch.rand(8, generator=torch.Generator().manual_seed(4)).tolist()
    check(
        logits_of(8, device, scale=scale, vocab=vocab),
        settings_of(8, device, vocab, uniforms=uniforms, **draw),
    )
