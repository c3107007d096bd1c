"""Which tokens of a packed or padded batch belong together.

Every rule of the method (sinks, window, eligibility, scorer state, future queries) counts tokens inside one document. So the
core never sees packing: a batch is cut into rows, one document a row, worked on, and laid back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Shapes: B batch, S sequence, N documents in the batch, L longest document; X any trailing dimensions.


@dataclass(frozen=True, eq=False)
class Documents:
    """The layout of a batch: ``ids_BS`` holds a document number per token, -1 for padding.

    A document is a run of equal numbers >= 0; equal numbers in two runs of one row are an error (ValueError), since the
    second run could not be told from a continuation.
    """

    ids_BS: Tensor

    def __post_init__(self) -> None:
        ids = self.ids_BS
        if ids.ndim != 2:
            raise ValueError(f"document ids must have shape [batch, tokens], got {tuple(ids.shape)}")
        starts = self._is_start.nonzero()
        pairs = torch.stack([starts[:, 0], ids[starts[:, 0], starts[:, 1]]])
        if pairs.unique(dim=1).shape[1] != pairs.shape[1]:
            raise ValueError("a document number appears in two separate runs of one row")

    @classmethod
    def single(cls, batch: int, length: int, device: torch.device | str = "cpu") -> Documents:
        """Every row is one document without padding."""
        return cls(torch.zeros(batch, length, dtype=torch.long, device=device))

    @classmethod
    def from_padding(cls, valid_BS: Tensor) -> Documents:
        """Every row is one document; ``valid_BS`` is False on padding."""
        return cls(torch.where(valid_BS.bool(), 0, -1))

    @cached_property
    def _is_start(self) -> Tensor:
        ids = self.ids_BS
        changed = torch.ones_like(ids, dtype=torch.bool)
        changed[:, 1:] = ids[:, 1:] != ids[:, :-1]
        return changed & (ids >= 0)

    @cached_property
    def _runs(self) -> tuple[Tensor, Tensor, Tensor]:
        """(batch_N, start_N, length_N) of every document, in row-major order."""
        batch_N, start_N = self._is_start.nonzero(as_tuple=True)
        row_BS = self.row_BS
        length_N = torch.bincount(row_BS[row_BS >= 0], minlength=len(batch_N))
        return batch_N, start_N, length_N

    @cached_property
    def row_BS(self) -> Tensor:
        """The row (document index in the batch, 0..N-1) of every token; -1 on padding."""
        row = self._is_start.flatten().long().cumsum(0).view_as(self.ids_BS) - 1
        return torch.where(self.ids_BS >= 0, row, -1)

    @property
    def valid_BS(self) -> Tensor:
        return self.ids_BS >= 0

    @property
    def length_N(self) -> Tensor:
        return self._runs[2]

    def first_row(self) -> Tensor:
        """The row of the batch that each document lies in: [N]."""
        return self._runs[0]

    def valid_rows(self, longest: int) -> Tensor:
        """Which places of rows of ``longest`` tokens hold one: [N, longest]."""
        return torch.arange(longest, device=self.ids_BS.device) < self.length_N[:, None]

    @cached_property
    def start_BS(self) -> Tensor:
        """Index of the first token of the document that holds each token; 0 on padding."""
        return torch.where(self.valid_BS, self._runs[1][self.row_BS.clamp(min=0)], 0) if len(self) else self.row_BS * 0

    @cached_property
    def end_BS(self) -> Tensor:
        """One past the last token of the document that holds each token; 0 on padding, which nothing may see."""
        if not len(self):
            return self.row_BS * 0
        _, start_N, length_N = self._runs
        return torch.where(self.valid_BS, (start_N + length_N)[self.row_BS.clamp(min=0)], 0)

    @cached_property
    def position_BS(self) -> Tensor:
        """Position of each token in its document; 0 on padding."""
        index = torch.arange(self.ids_BS.shape[1], device=self.ids_BS.device)
        return torch.where(self.valid_BS, index - self.start_BS, 0)

    @cached_property
    def is_trivial(self) -> bool:
        """True if every row is exactly one document without padding: then rows and batch are the same thing."""
        return bool((self.ids_BS == self.ids_BS[:, :1]).all() and (self.ids_BS >= 0).all())

    @cached_property
    def _count(self) -> int:
        return int(self._is_start.sum())

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _index_NL(self) -> Tensor:
        """Where in its sequence the tokens of each document are; past its length, its last one."""
        _, start_N, length_N = self._runs
        offset_L = torch.arange(int(length_N.max()) if len(self) else 0, device=start_N.device)
        return start_N[:, None] + torch.minimum(offset_L[None], length_N[:, None] - 1)

    def to_rows(self, x_BHSX: Tensor) -> Tensor:
        """[B, H, S, ...] to [N, H, L, ...]; what lies past a document's length repeats its last token. Differentiable."""
        if self.is_trivial:
            return x_BHSX
        batch_N = self._runs[0]
        return x_BHSX.transpose(1, 2)[batch_N[:, None], self._index_NL].transpose(1, 2)

    def from_rows(self, x_NHLX: Tensor, fill: float | int) -> Tensor:
        """[N, H, L, ...] back to [B, H, S, ...]; padding gets ``fill``. Differentiable."""
        if self.is_trivial:
            return x_NHLX
        if not len(self):
            return x_NHLX.new_full(
                (self.ids_BS.shape[0], x_NHLX.shape[1], self.ids_BS.shape[1], *x_NHLX.shape[3:]), fill
            )
        x_BSHX = x_NHLX.transpose(1, 2)[self.row_BS.clamp(min=0), self.position_BS]
        valid = self.valid_BS.view(*self.valid_BS.shape, *[1] * (x_BSHX.ndim - 2))
        return torch.where(valid, x_BSHX, fill).transpose(1, 2)
