"""Sampling one token for each row of a step. Tensors and settings only; no requests, no text, no
randomness of its own.

Order of settings: repetition penalty (prompt and output), presence and frequency penalties
(output), logit bias, allowed-token mask, temperature, top_k, top_p, min_p, draw. Temperature 0
takes the greatest logit after bias and mask, the lowest id among equals. Log-probabilities are
those of the raw logits, before any of it. A row's result depends on nothing but its own logits,
settings, counts and uniform number: rows of one kind go through the same tensor code whatever
stands beside them (see choose.py). On a CPU each row is drawn alone, because a row fits a core's
cache and the batch does not; on a GPU rows of one kind are drawn together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freetoken.engine.choose import DrawSettings, argmax, draw, draw_top_k, draw_top_p, top
from freetoken.engine.penalties import RowSettings, TokenCounts
from freetoken.errors import DeviceError
from freetoken.types import TokenLogprob


@dataclass(slots=True)
class SampleOutput:
    """What a step chose. S rows; K the most likeliest tokens any row asked for.

    ids           [S] int64
    is_sound      [S] bool; False: the logits held NaN or +inf, or no token was left: no id
    logprobs      [S] float32, or None if no row asked; 0 in rows that did not
    top_ids       [S, K] int64, likeliest first, equals by lowest id; 0 beyond a row's own K
    top_logprobs  [S, K] float32
    """

    ids: Tensor
    is_sound: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None

    def check(self) -> None:
        """Raise DeviceError naming the rows that are not sound. Waits for the device: call it where
        the ids are read.
        """
        if bool(self.is_sound.all()):
            return
        rows = _plain((~self.is_sound).nonzero().flatten())
        raise DeviceError(
            f"expected finite logits, got NaN, infinity or no allowed token in rows {rows}"
            " of the step; the weights or a kernel are broken, or a mask allowed nothing"
        )

    def token_logprobs(self, rows: Sequence[RowSettings]) -> list[TokenLogprob | None]:
        """Return each row's log-probabilities as plain values, None for rows that asked for none.

        Waits for the device.
        """
        if self.logprobs is None:
            return [None] * len(rows)
        ids, logprobs = _plain(self.ids), _plain(self.logprobs)
        top_ids, top_logprobs = _plain(self.top_ids), _plain(self.top_logprobs)
        result: list[TokenLogprob | None] = []
        for i, row in enumerate(rows):
            k = row.logprobs
            if k is None:
                result.append(None)
            else:
                best = tuple(zip(top_ids[i][:k], top_logprobs[i][:k], strict=True))
                result.append(TokenLogprob(ids[i], logprobs[i], best))
        return result


class Sampler:
    """Owns the per-slot token counts; the runner's thread is the only caller."""

    def __init__(self, num_slots: int, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._device = device
        self._is_row_alone = device.type == "cpu"
        self._counts = TokenCounts(num_slots, vocab, device)

    def start(
        self, slot: int, row: RowSettings, prompt: Sequence[int], output: Sequence[int] = ()
    ) -> None:
        """Begin a sequence in a slot; again after a preemption, with what it generated. Cheap
        without penalties.
        """
        if row.has_penalties:
            self._counts.start(slot, prompt, output)

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[RowSettings],
        slots: Sequence[int],
        uniforms: Tensor,
        allowed: Tensor | None = None,
    ) -> SampleOutput:
        """Choose a token for each row and count it for the penalties of its slot.

        logits    [S, V] float32, not changed
        slots     one a row, all different
        uniforms  [S] float64 in [0, 1), on the logits' device; greedy rows do not look at theirs
        allowed   [S, V] bool or None: False bans a token
        """
        if logits.shape != (len(rows), self._vocab) or logits.dtype != torch.float32:
            raise ValueError(
                f"expected float32 logits [{len(rows)}, {self._vocab}],"
                f" got {logits.dtype} {list(logits.shape)}"
            )
        if not rows:
            empty = torch.empty(0, dtype=torch.int64, device=self._device)
            return SampleOutput(empty, empty.to(torch.bool))
        groups = self._groups(rows)
        parts = [self._choose(group, logits, rows, slots, uniforms, allowed) for group in groups]
        if len(parts) == 1:
            output = SampleOutput(*parts[0])
        else:
            order = torch.tensor(
                [i for group in groups for i in group], device=self._device
            ).argsort()
            ids, is_sound = (torch.cat(part)[order] for part in zip(*parts, strict=True))
            output = SampleOutput(ids, is_sound)
        self._count(rows, slots, output.ids)
        self._add_logprobs(output, logits, rows)
        return output

    def _groups(self, rows: Sequence[RowSettings]) -> list[list[int]]:
        """Split row numbers into those chosen by one call."""
        kinds: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            kind = _kind(row)
            alone = f" {i}" if self._is_row_alone and kind != "greedy" else ""
            kinds.setdefault(kind + alone, []).append(i)
        return list(kinds.values())

    def _choose(
        self,
        group: list[int],
        logits: Tensor,
        rows: Sequence[RowSettings],
        slots: Sequence[int],
        uniforms: Tensor,
        allowed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Choose for the rows of one kind."""
        first = rows[group[0]]
        if len(group) < len(rows):
            # Neighbours in the step stay a view; others are gathered.
            is_run = group[-1] - group[0] + 1 == len(group)
            chosen = (
                slice(group[0], group[-1] + 1)
                if is_run
                else torch.tensor(group, device=self._device)
            )
            logits, uniforms = logits[chosen], uniforms[chosen]
            allowed = None if allowed is None else allowed[chosen]
        if any(rows[i].has_penalties or rows[i].bias is not None for i in group):
            logits = torch.stack(
                [self._adjust(x, rows[i], slots[i]) for i, x in zip(group, logits, strict=True)]
            )
        if allowed is not None:
            logits = logits.masked_fill(~allowed, float("-inf"))
        kind = _kind(first)
        if kind == "greedy":
            return argmax(logits)
        settings = self._settings([rows[i] for i in group])
        uniforms = uniforms[:, None]
        if kind == "top_k":
            return draw_top_k(logits, settings, max(rows[i].top_k for i in group), uniforms)
        return (
            draw_top_p(logits, settings, uniforms)
            if kind == "top_p"
            else draw(logits, settings, uniforms)
        )

    def _adjust(self, logits: Tensor, row: RowSettings, slot: int) -> Tensor:
        if row.has_penalties:
            logits = self._counts.penalize(logits, row, slot)
        if row.bias is not None and row.bias_ids is not None:
            logits = logits.index_add(0, row.bias_ids, row.bias)
        return logits

    def _settings(self, rows: Sequence[RowSettings]) -> DrawSettings:
        floats = [[r.temperature, r.top_p, r.min_p] for r in rows]
        x = torch.tensor(floats, dtype=torch.float64, device=self._device)
        top_k = torch.tensor([[r.top_k] for r in rows], device=self._device)
        return DrawSettings(x[:, 0:1], top_k, x[:, 1:2], x[:, 2:3])

    def _count(self, rows: Sequence[RowSettings], slots: Sequence[int], ids: Tensor) -> None:
        counted = [i for i, row in enumerate(rows) if row.has_penalties]
        if counted:
            self._counts.add([slots[i] for i in counted], ids[counted])

    def _add_logprobs(
        self, output: SampleOutput, logits: Tensor, rows: Sequence[RowSettings]
    ) -> None:
        asked = [(i, row.logprobs) for i, row in enumerate(rows) if row.logprobs is not None]
        if not asked:
            return
        num_top = max(k for _, k in asked)
        output.logprobs = torch.zeros(len(rows), device=self._device)
        output.top_ids = torch.zeros((len(rows), num_top), dtype=torch.int64, device=self._device)
        output.top_logprobs = torch.zeros((len(rows), num_top), device=self._device)
        for i, k in asked:
            raw = logits[i : i + 1]
            logprobs = raw.log_softmax(-1)
            output.logprobs[i] = logprobs[0].gather(0, output.ids[i : i + 1])[0]
            if k:
                ids = top(raw, k)[1]
                output.top_ids[i, :k] = ids[0]
                output.top_logprobs[i, :k] = logprobs.gather(1, ids)[0]


def _kind(row: RowSettings) -> str:
    """Name the code path of a row, which its own settings alone decide."""
    if row.temperature == 0.0:
        return "greedy"
    if row.top_k:
        return "top_k"
    return "top_p" if row.top_p < 1.0 else "plain"


def _plain(tensor: Any) -> Any:  # noqa: ANN401
    """Copy a tensor to lists of numbers; its type is torch's business."""
    return tensor.tolist()
