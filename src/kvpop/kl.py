"""KL to the dense teacher without ever holding the logits of a whole sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Shapes: B batch, S sequence, X valid tokens (or a chunk of them), E model width, V vocabulary, K teacher logits kept.


@dataclass(frozen=True)
class TopLogits:
    """What the KL needs of the teacher: its K likeliest tokens, the log-probability of each, and of all others together.

    K = V if everything is kept; then ``rest`` is not read. Two numbers a kept token: 50 MB for 16k tokens and K = 256.
    """

    index_XK: Tensor
    log_p_XK: Tensor
    rest_X: Tensor

    def part(self, rows: slice) -> TopLogits:
        return TopLogits(self.index_XK[rows], self.log_p_XK[rows], self.rest_X[rows])


def top_logits(logits_XV: Tensor, top: int) -> TopLogits:
    """The ``top`` likeliest tokens, in float32 at least; all of them for top >= V."""
    log_p_XV = logits_XV.to(torch.promote_types(logits_XV.dtype, torch.float32)).log_softmax(-1)
    log_p_XK, index_XK = log_p_XV.topk(min(top, log_p_XV.shape[-1]), dim=-1)
    return TopLogits(index_XK, log_p_XK, (1 - log_p_XK.exp().sum(-1)).clamp(min=0))


def top_k_kl(teacher: TopLogits, student_XV: Tensor) -> Tensor:
    """KL(teacher || student) [X] in nats over the tokens that the teacher kept, everything else pooled in one bucket.

    A lower bound of the full KL, equal to it if all are kept, and zero only if the two agree on every kept token.
    """
    log_q_XV = student_XV.to(torch.promote_types(student_XV.dtype, torch.float32)).log_softmax(-1)
    log_q = log_q_XV.gather(-1, teacher.index_XK)
    kept = (teacher.log_p_XK.exp() * (teacher.log_p_XK - log_q)).sum(-1)
    if teacher.index_XK.shape[-1] == student_XV.shape[-1]:
        return kept
    tiny = torch.finfo(torch.float32).eps
    rest_q = (1 - log_q.exp().sum(-1)).clamp(min=tiny)
    rest_p = teacher.rest_X
    return kept + torch.where(rest_p > tiny, rest_p * (rest_p.clamp(min=tiny).log() - rest_q.log()), 0.0)


@torch.no_grad()
def teacher_logits(hidden_BSE: Tensor, head: nn.Module, valid_BS: Tensor, *, top: int, chunk: int) -> TopLogits:
    """The teacher's likeliest tokens at every valid position; ``chunk`` tokens of logits exist at once."""
    pieces = [top_logits(head(part), top) for part in hidden_BSE[valid_BS].split(chunk)]
    if not pieces:
        pieces = [top_logits(head(hidden_BSE[valid_BS]), top)]
    return TopLogits(*(torch.cat(parts) for parts in zip(*((p.index_XK, p.log_p_XK, p.rest_X) for p in pieces))))


def distillation_kl(hidden_BSE: Tensor, head: nn.Module, teacher: TopLogits, valid_BS: Tensor, *, chunk: int) -> Tensor:
    """The KL in nats, summed over valid tokens; ``chunk`` tokens of logits exist at once, recomputed in the backward pass."""

    def piece(student_XE: Tensor, part: TopLogits) -> Tensor:
        return top_k_kl(part, head(student_XE)).sum()

    hidden_XE = hidden_BSE[valid_BS]
    total = hidden_XE.sum() * 0.0  # a graph even where no token is valid: every process joins in the backward pass
    for start in range(0, len(hidden_XE), chunk):
        rows = slice(start, start + chunk)
        total = total + checkpoint(piece, hidden_XE[rows], teacher.part(rows), use_reentrant=False)
    return total
