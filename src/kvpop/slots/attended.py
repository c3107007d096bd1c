"""The store of TOVA: no scores, no window; the last query decides."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpop.core.cutoff import NEVER, ranks
from kvpop.ops.cache_step.api import least, take, write
from kvpop.ops.sparse_attention.api import chunk_impl, sparse_attention
from kvpop.slots.base import FAR, Slots

# Shapes: B rows, R = H * G query heads, H KV heads, M slots, n new tokens, T = M + n candidates, D head dim.


class AttendedSlots(Slots):
    """TOVA: attend to everything held, then keep the B tokens that the last query's heads attended to most, on average.

    One set per layer; no sinks, no protected window. A chunk attends to all it finds, then is reduced once: prefill
    depends on where chunks end, by definition of the policy.
    """

    chunk = FAR

    def __init__(self, slots: int, k_like: Tensor, v_like: Tensor) -> None:
        (rows, H), device = k_like.shape[:2], k_like.device
        self.slots = slots
        self.keys = torch.zeros(rows, H, slots, k_like.shape[-1], dtype=k_like.dtype, device=device)
        self.values = torch.zeros(rows, H, slots, v_like.shape[-1], dtype=v_like.dtype, device=device)
        self.position = torch.full((rows, H, slots), -1, dtype=torch.int32, device=device)
        self.seen = torch.zeros(rows, dtype=torch.long, device=device)
        self.taken = torch.zeros((), dtype=torch.long, device=device)

    def step(self, q_BR1D: Tensor, k_BH1D: Tensor, v_BH1D: Tensor, valid_B: Tensor | None, scale: float) -> Tensor:
        """Attend to the held tokens and the new one, then drop the least attended of them all; slots stay in place."""
        B, H, M, D = self.keys.shape
        wide = torch.promote_types(q_BR1D.dtype, torch.float32)
        q_BHGD = q_BR1D.to(wide).mul(scale).view(B, H, -1, D)
        keys, new_key = self.keys.to(wide), k_BH1D.to(wide)
        held_BM = self.position[:, 0] >= 0
        logits = torch.cat([q_BHGD @ keys.transpose(-1, -2), q_BHGD @ new_key.transpose(-1, -2)], dim=-1)
        logits[..., :M].masked_fill_(~held_BM[:, None, None], -torch.inf)
        weight_BHGT = logits.softmax(-1)
        out = weight_BHGT[..., :M] @ self.values.to(wide) + weight_BHGT[..., M:] @ v_BH1D.to(wide)
        now_B1 = self.seen[:, None].clone()
        position_BT = torch.cat([self.position[:, 0], now_B1.int()], dim=-1)
        victim_B1 = least(weight_BHGT.mean((1, 2)), position_BT, torch.ones_like(position_BT, dtype=torch.bool))[
            :, None
        ]
        slot_B1 = torch.where(now_B1 < M, now_B1, victim_B1)
        stored_B = slot_B1[:, 0] < M  # a new token that is itself the least attended is not stored
        if valid_B is not None:
            stored_B &= valid_B
        index_BH1 = slot_B1.clamp(max=M - 1)[:, None].expand(B, H, 1)
        write(self.keys, index_BH1, k_BH1D, stored_B)
        write(self.values, index_BH1, v_BH1D, stored_B)
        write(self.position, index_BH1, now_B1[:, None].expand(B, H, 1).int(), stored_B)
        self.seen += 1 if valid_B is None else valid_B
        return out.view(q_BR1D.shape[:3] + out.shape[-1:]).to(q_BR1D.dtype)

    def extend(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, count_B: Tensor, scale: float) -> Tensor:
        B, H, n, D = k_BHnD.shape
        offset_n = torch.arange(n, device=k_BHnD.device)
        now_Bn = torch.where(offset_n < count_B[:, None], self.seen[:, None] + offset_n, FAR)
        position = torch.cat([self.position.long().where(self.position >= 0, FAR), now_Bn[:, None].expand(B, H, n)], 2)
        keys, values = torch.cat([self.keys, k_BHnD], 2), torch.cat([self.values, v_BHnD], 2)
        expiry = torch.where(position < FAR, NEVER, 0)
        out, lse_BRn = sparse_attention(
            q_BRnD, keys, values, expiry, scale=scale, q_pos_BQ=now_Bn, k_pos_BHT=position,
            impl=chunk_impl(q_BRnD, keys, values),
        )  # fmt: skip
        last_B = (count_B - 1).clamp(min=0)[:, None, None]
        q_BRD = q_BRnD.gather(2, last_B[..., None].expand(B, q_BRnD.shape[1], 1, D))[:, :, 0]
        lse_BR = lse_BRn.gather(2, last_B.expand(B, q_BRnD.shape[1], 1))
        logits = (keys.to(lse_BR.dtype) @ q_BRD.to(lse_BR.dtype).view(B, H, -1, D).transpose(-1, -2)) * scale
        weight_BT = (
            (logits - lse_BR.view(B, H, 1, -1)).exp().mean((1, 3)).masked_fill(position[:, 0] >= FAR, -torch.inf)
        )
        # Best B by (weight, position), then by position; a row without new tokens keeps what it holds.
        by_position = position[:, 0].argsort(dim=-1, stable=True)
        rank_BT = torch.empty_like(by_position).scatter_(-1, by_position, ranks(weight_BT.gather(-1, by_position)))
        held = (position[:, 0] < FAR).sum(-1, keepdim=True)
        stays = rank_BT >= position.shape[-1] - held.clamp(max=self.slots)
        stays = torch.where(count_B[:, None] > 0, stays, position[:, 0] < FAR)
        chosen = position[:, 0].masked_fill(~stays, FAR).argsort(dim=-1, stable=True)[:, : self.slots]
        index = chosen[:, None].expand(B, H, -1)
        self.keys.copy_(take(keys, index))
        self.values.copy_(take(values, index))
        self.position.copy_(take(position, index).where(take(stays[:, None].expand(B, H, -1), index), -1))
        self.seen += count_B
        return out
