"""What every store does: take tokens in, say what their queries attend to, and move its rows about."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kvpop.ops.cache_step.api import take

# Shapes: B rows, R = H * G query heads, H KV heads, M slots, n new tokens, T = M + n candidates, D head dim, E = D_k + D_v.

FAR = 2**30
"""The position given to empty slots and padding: after everything real, far from overflow."""

CHUNK = 512
"""Longest piece of a prompt worked on at once; the result does not depend on it."""


EVERY = slice(None)


def place(x: Tensor) -> tuple[object, ...]:
    """What a captured step knows of a tensor: another one may come to lie where it was."""
    return x.data_ptr(), tuple(x.shape), x.stride()


def stay(*tensors: Tensor) -> None:
    """Say that a captured graph will find these where they are."""
    for x in tensors:
        if x.device.type == "cuda" and not x.is_inference() and not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(x)


class Slots(ABC):
    """Keys, values and the position of what each slot holds (-1: empty), and how many tokens each row has seen.

    Everything that changes with a token is a tensor on the layer's device: one step costs no host synchronisation and looks
    the same to ``torch.compile`` before, at and after the first eviction.
    """

    keys: Tensor
    values: Tensor
    position: Tensor
    """[B, H, M], as the slots of ``keys`` and ``values``; a store whose heads differ in size lays those out otherwise."""
    seen: Tensor
    """Real tokens taken in by each row [B], int64."""
    taken: Tensor
    """Tokens taken in by every row, padding included [], int64: what transformers calls the length of a cache."""
    reach = 0
    """How many of the last tokens can be taken back."""
    chunk: int = CHUNK
    fixed = False
    """Whether a store without a bound has what the next steps need, in memory that stays where it is: see ``reserve``."""
    _known: tuple[object, ...] = ()
    """Where memory was when it was reserved."""

    @torch.no_grad()
    def attend(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, valid_Bn: Tensor | None, scale: float) -> Tensor:
        """Take in n tokens a row and return what their queries attend to, [B, R, n, D_v].

        ``valid_Bn`` is False on padding, anywhere in the row: padding is never held or counted, and gets zeros. Carries no
        gradient: training runs on whole sequences.
        """
        n = q_BRnD.shape[2]
        self.taken += n
        if n == 1:
            out = self.step(q_BRnD, k_BHnD, v_BHnD, None if valid_Bn is None else valid_Bn[:, 0], scale)
            return out if valid_Bn is None else out.masked_fill(~valid_Bn[:, None, :, None], 0.0)
        cut = max(n - self.reach, 0)  # what may be taken back is a piece of its own
        pieces = []
        for part in (slice(0, cut), slice(cut, n)):
            if part.stop > part.start:
                valid = None if valid_Bn is None else valid_Bn[:, part]
                pieces.append(self._several(q_BRnD[:, :, part], k_BHnD[:, :, part], v_BHnD[:, :, part], valid, scale))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def _several(self, q: Tensor, k: Tensor, v: Tensor, valid_Bn: Tensor | None, scale: float) -> Tensor:
        if valid_Bn is None:
            return self._chunks(q, k, v, None, scale)
        # Real tokens first, in order; padding behind them.
        order_Bn = (~valid_Bn).long().argsort(dim=-1, stable=True)
        q, k, v = (take(x, order_Bn[:, None].expand(-1, x.shape[1], -1)) for x in (q, k, v))
        out = self._chunks(q, k, v, valid_Bn, scale)
        back_Bn = order_Bn.argsort(-1)
        return take(out, back_Bn[:, None].expand(-1, out.shape[1], -1)).masked_fill(~valid_Bn[:, None, :, None], 0.0)

    def _chunks(self, q: Tensor, k: Tensor, v: Tensor, valid_Bn: Tensor | None, scale: float) -> Tensor:
        n = q.shape[2]
        count_B = torch.full_like(self.seen, n) if valid_Bn is None else valid_Bn.sum(-1)
        pieces, most = [], self.at_once(q, k, v)
        for start in range(0, n, most):
            part = slice(start, min(start + most, n))
            here_B = (count_B - start).clamp(0, part.stop - start)
            pieces.append(self.extend(q[:, :, part], k[:, :, part], v[:, :, part], here_B, scale))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)

    def at_once(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor) -> int:
        """How many tokens a row to take in at a time."""
        return self.chunk

    @abstractmethod
    def extend(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, count_B: Tensor, scale: float) -> Tensor:
        """Take in the first ``count_B`` of n tokens a row; queries past the count return anything finite."""

    def step(self, q_BR1D: Tensor, k_BH1D: Tensor, v_BH1D: Tensor, valid_B: Tensor | None, scale: float) -> Tensor:
        """Take in one token for every row where ``valid_B`` holds (None: all rows); the others stay as they are."""
        count_B = torch.ones_like(self.seen) if valid_B is None else valid_B.long()
        return self.extend(q_BR1D, k_BH1D, v_BH1D, count_B, scale)

    def tensors(self) -> dict[str, Tensor]:
        """Everything the store keeps for its rows, by name, rows along dim 0."""
        return {name: getattr(self, name) for name in ("keys", "values", "position", "seen")}

    def replace(self, tensors: dict[str, Tensor]) -> None:
        """Put back what ``tensors`` returned, perhaps with other rows or on another device."""
        for name, x in tensors.items():
            setattr(self, name, x)

    def select(self, rows_n: Tensor) -> None:
        """Keep, reorder or repeat rows: every tensor moves together. The same number of rows stays in the same memory."""
        with torch.inference_mode(False), torch.no_grad():
            own = self.tensors()
            moved = {name: x.index_select(0, rows_n.to(x.device)) for name, x in own.items()}
            if len(rows_n) == len(self.seen):
                for name, x in own.items():
                    x.copy_(moved[name])
            else:
                self.replace(moved)

    def clear(self, rows: slice = EVERY) -> None:
        """Empty the given rows, in place."""
        with torch.inference_mode(False), torch.no_grad():
            for name, x in self.tensors().items():
                x[rows] = -1 if name == "position" else 0
            if rows == EVERY:
                self.taken.zero_()

    def put(self, row: int, other: Slots, other_row: int = 0) -> None:
        """Overwrite one row with a row of a store of the same kind and size, in place."""
        with torch.inference_mode(False), torch.no_grad():
            theirs = other.tensors()
            for name, x in self.tensors().items():
                x[row].copy_(theirs[name][other_row])

    def to(self, device: torch.device | str) -> None:
        """Move everything the store keeps to another device."""
        with torch.inference_mode(False), torch.no_grad():
            self.replace({name: x.to(device) for name, x in self.tensors().items()})
            self.taken = self.taken.to(device)

    def record(self, reach: int) -> None:
        """From now on be able to take back the last ``reach`` tokens, exactly. Raises ValueError if the store cannot."""
        raise ValueError(f"{type(self).__name__} cannot roll back: what it keeps depends on how the tokens were read")

    @property
    def undoable(self) -> int:
        """How many tokens ``crop`` can take back now."""
        return 0

    def crop(self, tokens: int) -> None:
        """Take back the last ``tokens`` tokens of every row, padding counted. At most ``undoable`` of them."""
        raise ValueError(f"{type(self).__name__} cannot roll back {tokens} tokens")

    def reserve(self, tokens: int) -> bool:
        """Give a store that grows what the next ``tokens`` steps need; whether memory has moved since the last call.

        Others need nothing.
        """
        return False

    def _moved(self, *tensors: Tensor) -> bool:
        """Whether these are not where they were at the last call; from now on they stay."""
        before, self._known = self._known, tuple(place(x) for x in tensors)
        if moved := before != self._known:
            stay(*tensors)
        return moved

    def check(self) -> None:  # noqa: B027 (most have nothing to check)
        """Raise RuntimeError if steps needed more than was reserved; asks the device where anything was."""

    def pin(self, spans_BP2: Tensor) -> None:
        """Never drop the tokens whose positions lie in one of a row's half-open spans [start, stop)."""
        raise ValueError(f"{type(self).__name__} cannot pin tokens")

    def nbytes(self) -> int:
        """Bytes of everything the store keeps."""
        return sum(x.numel() * x.element_size() for x in [*self.tensors().values(), self.taken])

    def tokens_held(self, row: int) -> Tensor:
        """How many tokens all heads of a row hold together []."""
        return (self.position[row] >= 0).sum()

    def held(self) -> list[list[list[int]]]:
        """Positions held, sorted, per row and KV head (moves to the CPU: for reports and tests)."""
        return [[sorted(p for p in head if p >= 0) for head in row] for row in self.position.tolist()]
