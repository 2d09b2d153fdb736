"""Penalties and logit bias over a whole reply, against the slow ones in slow_sampling.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freetoken.engine.penalties import RowSettings
from freetoken.engine.sampler import Sampler
from freetoken.errors import RequestError
from freetoken.types import SamplingParams as Params
from tests.engine import slow_sampling

CPU = torch.device("cpu")
PENALTIES = [
    Params(temperature=0, repetition_penalty=1.8),
    Params(temperature=0, repetition_penalty=0.6),
    Params(temperature=0, presence_penalty=1.5),
    Params(temperature=0, frequency_penalty=0.7),
    Params(temperature=0, frequency_penalty=-0.4),
    Params(
        repetition_penalty=1.3,
        presence_penalty=-0.5,
        frequency_penalty=0.3,
        logit_bias={3: 2.0, 4: -2.0},
    ),
]


@pytest.mark.parametrize("params", PENALTIES, ids=range(len(PENALTIES)))
def test_penalties_equal_slow_ones_over_a_reply(params: Params) -> None:
    """A penalty counted prompt tokens it should not, missed outputs, or changed the wrong way on
    negative logits.
    """
    vocab, prompt, output = 40, [1, 2, 2, 39], [5, 5]
    row = RowSettings.of(params, vocab, CPU)
    sampler = Sampler(3, vocab, CPU)
    sampler.start(1, row, [7, 8, 9], [1])  # whoever had the slot before
    sampler.start(1, row, prompt, output)
    for step in range(90):
        raw = torch.randn(1, vocab, generator=torch.Generator().manual_seed(step))
        logits = slow_sampling.adjusted(raw[0].double().numpy(), params, prompt, output)
        u = (step * 0.618) % 1
        token = int(sampler.sample(raw, [row], [1], torch.tensor([u], dtype=torch.float64)).ids)
        if params.temperature == 0:
            assert logits[token] >= logits.max() - 1e-5
        else:
            edges = np.cumsum(slow_sampling.distribution(logits, params))
            assert (edges[token - 1] if token else 0.0) - 1e-5 <= u <= edges[token] + 1e-5
        output.append(token)


def test_bias_outside_vocabulary_is_refused() -> None:
    """A biased token id beyond the vocabulary killed the runner."""
    for token in (200, -1):
        with pytest.raises(RequestError, match="expected token ids from 0 to 199") as error:
            RowSettings.of(Params(logit_bias={token: 1.0}), 200, CPU)
        assert error.value.param == f"logit_bias.{token}"
