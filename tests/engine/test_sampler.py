"""Sampling against the slow implementation in slow_sampling.py, and the promises on ties, batches
and broken logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from freetoken.engine import choose
from freetoken.engine.penalties import RowSettings
from freetoken.engine.sampler import SampleOutput, Sampler
from freetoken.errors import DeviceError
from freetoken.types import SamplingParams as Params
from tests.engine import slow_sampling

CPU = torch.device("cpu")
GRID = 4000
"""Uniform numbers (i + 0.5) / GRID: each token's frequency is its probability to within 1 / GRID.
"""


def random_logits(num_rows: int, vocab: int, spread: float = 2.0, seed: int = 0) -> Tensor:
    """Return [num_rows, vocab] normal logits."""
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def sample(
    logits: Tensor, params: Sequence[Params], uniforms: Sequence[float] | None = None
) -> SampleOutput:
    """Sample each row once, in a sampler that knows nothing yet."""
    sampler = Sampler(len(params), logits.shape[1], CPU)
    rows = [RowSettings.of(p, logits.shape[1], CPU) for p in params]
    for slot, row in enumerate(rows):
        sampler.start(slot, row, [])
    u = torch.tensor(uniforms or [0.5] * len(rows), dtype=torch.float64)
    return sampler.sample(logits, rows, range(len(rows)), u)


def frequencies(logits: Tensor, params: Params, count: int = GRID) -> np.ndarray:
    """Draw one row with an even grid of uniform numbers; return each token's frequency."""
    row = RowSettings.of(params, logits.shape[0], CPU)
    sampler = Sampler(1, logits.shape[0], CPU)
    hits = np.zeros(logits.shape[0])
    for i in range(count):
        u = torch.tensor([(i + 0.5) / count], dtype=torch.float64)
        hits[int(sampler.sample(logits[None], [row], [0], u).ids)] += 1
    return hits / count


SETTINGS = {
    "plain": Params(),
    "hot": Params(temperature=1.7),
    "cold": Params(temperature=0.3),
    "top_k": Params(top_k=5),
    "top_k-above-vocab": Params(top_k=1000),
    "top_p": Params(top_p=0.7),
    "top_p-tiny": Params(top_p=1e-6),
    "min_p": Params(min_p=0.2),
    "min_p-1": Params(min_p=1.0),
    "top_k-top_p": Params(top_k=8, top_p=0.6),
    "top_k-min_p": Params(top_k=12, min_p=0.1, temperature=0.8),
    "top_p-min_p": Params(top_p=0.9, min_p=0.15),
    "all": Params(temperature=1.3, top_k=20, top_p=0.85, min_p=0.02),
}


@pytest.mark.parametrize("vocab", [30, 300])
@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS.keys())
def test_frequencies_equal_slow_distribution(params: Params, vocab: int) -> None:
    """A filter kept a token too many or too few, or tokens were drawn with other odds than their
    probabilities.
    """
    logits = random_logits(1, vocab, seed=vocab)[0]
    expected = slow_sampling.distribution(logits.double().numpy(), params)
    count = 600
    got = frequencies(logits, params, count)
    assert np.abs(got - expected).max() <= 1.01 / count
    assert not (got[expected == 0]).any()


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0], ids=lambda s: f"spread={s}")
@pytest.mark.parametrize(
    "params", [Params(top_p=0.95), Params(top_p=0.5, min_p=0.3), Params(top_k=700)]
)
def test_wide_choice_equals_slow_distribution(params: Params, spread: float) -> None:
    """Rows that need more candidates than the first few went wrong: flat ones, and ones full of
    equal logits.
    """
    vocab = 3000
    logits = (random_logits(1, vocab, spread)[0] * 4).round() / 4
    expected = slow_sampling.distribution(logits.double().numpy(), params)
    uniforms = [(i + 0.5) / 97 for i in range(97)]
    ids = sample(logits.expand(97, -1).contiguous(), [params] * 97, uniforms).ids.numpy()
    assert (expected[ids] > 0).all()
    order = (
        np.lexsort((np.arange(vocab), -logits.numpy())) if params.top_k > 0 else np.arange(vocab)
    )
    edges = np.cumsum(expected[order])
    places = np.argsort(order)[ids]
    assert (np.abs(edges[places] - np.array(uniforms)) <= expected[ids] + 1e-5).all()


def test_wide_top_p_keeps_exactly_the_tokens_of_the_slow_one() -> None:
    """The bin in which top_p falls was kept whole or dropped whole, or cut in the wrong order among
    equals.
    """
    for seed, spread, steps in [(1, 0.2, 8), (2, 1.0, 2048), (3, 0.0, 1), (4, 2.0, 512)]:
        logits = (random_logits(1, 2000, spread, seed) * steps).round() / steps
        weights = (logits.double().softmax(-1) * 2.0**44).to(torch.int64)[0]
        for top_p in (0.1, 0.5, 0.9, 0.999):
            limit = top_p * weights.sum().double()[None]
            order = logits[0].argsort(descending=True, stable=True)
            before = weights[order].cumsum(0) - weights[order]
            expected = torch.zeros(2000, dtype=torch.bool)
            expected[order] = before < limit
            assert torch.equal(choose._nucleus(logits[0], weights, limit), expected)


def test_few_candidates_and_whole_row_draw_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of the two ways a row took showed in its token, so a neighbour's width decided it."""
    logits = random_logits(1, 5000, 3.5).expand(200, -1).contiguous()
    uniforms = [i / 200 for i in range(200)]
    params = [Params(top_p=0.9, min_p=0.001)] * 200
    narrow = sample(logits, params, uniforms).ids
    monkeypatch.setattr(choose, "_NUM_CANDIDATES", 1)
    assert torch.equal(sample(logits, params, uniforms).ids, narrow)
    assert 5 < len(narrow.unique()) < 64


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 5000])
def test_greedy_takes_lowest_id_among_equals(vocab: int) -> None:
    """Equal logits gave another token on another machine or batch."""
    logits = random_logits(6, vocab).round()
    for params in (Params(temperature=0), Params(top_k=1), Params(temperature=1e-7)):
        ids = sample(logits, [params] * 6).ids.tolist()
        assert ids == [int(np.argmax(row)) for row in logits.numpy()]


def test_zeros_of_either_sign_are_equal() -> None:
    """-0.0 sorted below 0.0, so ties were not by lowest id."""
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])
    assert sample(logits, [Params(temperature=0)]).ids.tolist() == [1]
    assert choose.top(logits, 3)[1].tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("k", [1, 5, 60, 100, 4000])
def test_top_equals_full_sort(k: int) -> None:
    """The search by blocks lost a token or an order among equals."""
    for vocab in (4000, 20001):
        values = random_logits(3, vocab).round()
        values[0, 7] = float("-inf")
        values[1, : vocab - 3] = float("-inf")
        order = values.argsort(dim=-1, descending=True, stable=True)[:, :k]
        got, ids = choose.top(values, k)
        assert torch.equal(ids, order)
        assert torch.equal(got, values.gather(1, order))


def test_top_p_always_keeps_the_likeliest() -> None:
    """top_p below the likeliest token's probability left nothing to draw from."""
    logits = random_logits(1, 500)
    for top_p in (0.0, 1e-12, 0.01):
        for u in (0.0, 0.999999):
            assert int(sample(logits, [Params(top_p=top_p)], [u]).ids) == int(logits.argmax())


@pytest.mark.parametrize("num_candidates", [2, 64])
def test_top_p_reached_exactly_keeps_no_more(
    num_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that reach top_p exactly were followed by one too many, or equals were kept by another
    order.
    """
    monkeypatch.setattr(choose, "_NUM_CANDIDATES", num_candidates)
    logits = torch.full((100, 8), 1.5)
    uniforms = [(i + 0.5) / 100 for i in range(100)]
    for params in (Params(top_p=0.5), Params(top_k=4, top_p=1.0), Params(top_k=6, top_p=4 / 6)):
        ids = sample(logits, [params] * 100, uniforms).ids
        assert ids.bincount().tolist() == [25] * 4, params


def test_rows_with_their_own_top_k_drawn_together() -> None:
    """The largest top_k of a group let a token too many into the other rows."""
    params = [Params(top_k=k) for k in (2, 50, 3)]
    rows = [RowSettings.of(p, 300, CPU) for p in params]
    sampler = Sampler(3, 300, CPU)
    sampler._is_row_alone = False
    uniforms = torch.full((3,), 1 - 2.0**-53, dtype=torch.float64)
    assert sampler.sample(torch.zeros(3, 300), rows, range(3), uniforms).ids.tolist() == [1, 49, 2]


def test_extreme_uniforms_stay_among_kept_tokens() -> None:
    """A uniform number next to 1 chose the last id of the vocabulary, of probability zero."""
    logits = torch.full((1, 1000), -50.0)
    logits[0, 3], logits[0, 500] = 10.0, 9.0
    last = 1 - 2.0**-53
    for params in (Params(), Params(top_p=0.99), Params(top_k=10), Params(min_p=0.01)):
        assert int(sample(logits, [params], [0.0]).ids) == 3
        assert int(sample(logits, [params], [last]).ids) == 500


def test_logit_bias_bans_and_forces() -> None:
    """-100 did not ban or +100 did not force."""
    logits = random_logits(1, 200)
    best = int(logits.argmax())
    for params in (Params(temperature=0), Params(), Params(top_p=0.99), Params(top_k=20)):
        ban, force = (
            replace(params, logit_bias={best: -100.0}),
            replace(params, logit_bias={7: 100.0}),
        )
        for u in (0.0, 0.3, 0.99):
            assert int(sample(logits, [ban], [u]).ids) != best
            assert int(sample(logits, [force], [u]).ids) == 7


def mixed_params() -> list[Params]:
    """Return one of each kind, so that a batch takes every path at once."""
    return [
        Params(temperature=0),
        Params(),
        Params(top_p=0.9),
        Params(top_k=30),
        Params(temperature=0, logprobs=3),
        Params(temperature=0.7, top_k=200, top_p=0.95),
        Params(min_p=0.05, logprobs=0),
        Params(repetition_penalty=1.2, presence_penalty=0.4),
        Params(top_p=0.99, temperature=2.0),
        Params(temperature=0, logit_bias={5: 3.0}),
        Params(),
        Params(top_p=0.5, frequency_penalty=0.9),
    ]


@pytest.mark.parametrize("vocab", [50, 1003, 49152])
@pytest.mark.parametrize("is_row_alone", [True, False], ids=["as-on-cpu", "as-on-gpu"])
def test_batch_equals_alone_bit_for_bit(vocab: int, is_row_alone: bool) -> None:
    """A row's token or log-probability changed with the rows beside it or their order."""
    params = mixed_params()
    n = len(params)
    logits = random_logits(n, vocab, 1.5)
    uniforms = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = [RowSettings.of(p, vocab, CPU) for p in params]

    def run(order: list[int]) -> dict[int, tuple[object, ...]]:
        sampler = Sampler(n, vocab, CPU)
        sampler._is_row_alone = is_row_alone
        for i in order:
            sampler.start(i, rows[i], range(0, 40, i + 1), [i, i])
        results: dict[int, tuple[object, ...]] = dict.fromkeys(order, ())
        for shift in range(3):
            x = logits[order].roll(shift, 1)
            output = sampler.sample(x, [rows[i] for i in order], order, uniforms[order])
            output.check()
            plain = output.token_logprobs([rows[i] for i in order])
            for place, i in enumerate(order):
                results[i] += (int(output.ids[place]), plain[place])
        return results

    together = run(list(range(n)))
    backwards = run(list(range(n))[::-1])
    assert together == backwards
    for i in range(n):
        assert run([i])[i] == together[i], params[i]


def test_logprobs_are_of_raw_logits() -> None:
    """Reported log-probabilities moved with temperature, bias or penalties, or the sampled token
    was missing.
    """
    vocab = 300
    logits = random_logits(2, vocab).round()
    params = Params(temperature=0.2, logit_bias={299: 100.0}, logprobs=5, top_k=3)
    rows = [RowSettings.of(params, vocab, CPU), RowSettings.of(Params(temperature=0), vocab, CPU)]
    output = Sampler(2, vocab, CPU).sample(
        logits, rows, [0, 1], torch.zeros(2, dtype=torch.float64)
    )
    got, none = output.token_logprobs(rows)
    assert none is None
    assert got is not None
    expected = logits[0].double().log_softmax(-1)
    assert got.token == 299
    assert got.logprob == pytest.approx(float(expected[299]), abs=1e-5)
    best = sorted(range(vocab), key=lambda t: (-float(logits[0, t]), t))[:5]
    assert [t for t, _ in got.top] == best
    assert [p for _, p in got.top] == pytest.approx([float(expected[t]) for t in best], abs=1e-5)


def test_logprobs_of_all_tokens_sum_to_one() -> None:
    """Log-probabilities were not normalised, or more tokens were asked for than there are."""
    output = sample(random_logits(1, 50), [Params(temperature=0, logprobs=80)])
    plain = output.token_logprobs([RowSettings.of(Params(logprobs=80), 50, CPU)])[0]
    assert plain is not None
    assert len(plain.top) == 50
    assert sum(np.exp(p) for _, p in plain.top) == pytest.approx(1.0, abs=1e-5)
    assert plain.logprob == plain.top[0][1]


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params", [Params(temperature=0), Params(), Params(top_p=0.9), Params(top_k=40)]
)
def test_broken_row_is_named(params: Params, value: float) -> None:
    """A NaN from a broken kernel became a token of somebody's text."""
    logits = random_logits(3, 1000)
    logits[1, 600] = value
    with pytest.raises(DeviceError, match=r"rows \[1\] of the step"):
        sample(logits, [params] * 3).check()


def test_mask_bans_tokens_on_every_path() -> None:
    """A token outside the grammar was chosen, or a mask that allows nothing gave a token."""
    params = mixed_params()
    n, vocab = len(params), 400
    rows = [RowSettings.of(p, vocab, CPU) for p in params]
    sampler = Sampler(n, vocab, CPU)
    for i, row in enumerate(rows):
        sampler.start(i, row, [])
    allowed = random_logits(n, vocab, seed=4) > 2.5
    allowed[:, 399] = True
    allowed[8] = False
    logits, before = random_logits(n, vocab), random_logits(n, vocab)
    output = sampler.sample(
        logits, rows, range(n), torch.full((n,), 0.77, dtype=torch.float64), allowed
    )
    assert torch.equal(logits, before)
    assert output.is_sound.tolist() == [i != 8 for i in range(n)]
    assert all(bool(allowed[i, t]) for i, t in enumerate(output.ids.tolist()) if i != 8)


def test_wrong_logits_are_refused() -> None:
    """Half-precision logits or a padded vocabulary were sampled as if they fitted."""
    row = RowSettings.of(Params(), 10, CPU)
    sampler = Sampler(1, 10, CPU)
    for logits in (
        torch.zeros(1, 10, dtype=torch.bfloat16),
        torch.zeros(1, 11),
        torch.zeros(2, 10),
    ):
        with pytest.raises(ValueError, match="expected float32 logits"):
            sampler.sample(logits, [row], [0], torch.zeros(1, dtype=torch.float64))


def test_no_rows_give_no_ids() -> None:
    """A step of prefill chunks only, of which none samples, crashed."""
    output = Sampler(1, 10, CPU).sample(
        torch.zeros(0, 10), [], [], torch.zeros(0, dtype=torch.float64)
    )
    output.check()
    assert output.ids.tolist() == []
