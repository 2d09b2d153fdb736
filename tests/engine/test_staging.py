"""Host values packed for one copy, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freetoken.engine.staging import Staging, Uploads

pytestmark = pytest.mark.gpu


def test_uploads_arrive_whole_in_their_types_also_beyond_the_buffer() -> None:
    """An array that lies over its neighbour, or a long one that is cut."""
    uploads = Uploads(torch.device("cuda"), 256, ring=2)
    for turn in range(5):
        arrays = {
            "a": np.arange(turn, turn + 3, dtype=np.int32),
            "none": np.zeros(0, np.int64),
            "b": np.arange(40 * (turn + 1), dtype=np.int64),
            "c": np.array([0.5, turn], np.float64),
        }
        sent = uploads.send(arrays)
        torch.cuda.current_stream().synchronize()
        for name, array in arrays.items():
            assert sent[name].cpu().numpy().dtype == array.dtype
            assert sent[name].tolist() == array.tolist()


def test_staged_fields_keep_their_addresses() -> None:
    """A captured graph that reads where nothing is written any more."""
    staging = Staging({"a": np.int32, "b": np.float64}, 3, torch.device("cuda"))
    addresses = {name: tensor.data_ptr() for name, tensor in staging.device.items()}
    for turn in range(6):
        fields = staging.begin()
        fields["a"][:] = [turn, 1, 2]
        fields["b"][:] = [0.25, turn, 7.0]
        staging.send()
        torch.cuda.current_stream().synchronize()
        assert staging.device["a"].tolist() == [turn, 1, 2]
        assert staging.device["b"].tolist() == [0.25, turn, 7.0]
        assert {name: t.data_ptr() for name, t in staging.device.items()} == addresses
