"""KL to the dense teacher without ever holding the logits of a whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Shapes: B batch, S sequence, X tokens of a chunk, E model width, V vocabulary, K teacher logits kept.


def top_k_kl(teacher_XV: Tensor, student_XV: Tensor, top: int) -> Tensor:
    """KL(teacher || student) [X] in nats over the teacher's ``top`` tokens, everything else pooled in one bucket.

    A lower bound of the full KL, equal to it for top >= V, and zero only if the two agree on every kept token.
    """
    teacher_XV, student_XV = teacher_XV.float().log_softmax(-1), student_XV.float().log_softmax(-1)
    if top >= teacher_XV.shape[-1]:
        return (teacher_XV.exp() * (teacher_XV - student_XV)).sum(-1)
    log_p, index = teacher_XV.topk(top, dim=-1)
    log_q = student_XV.gather(-1, index)
    kept = (log_p.exp() * (log_p - log_q)).sum(-1)
    tiny = torch.finfo(torch.float32).eps
    rest_p = (1 - log_p.exp().sum(-1)).clamp(min=0)
    rest_q = (1 - log_q.exp().sum(-1)).clamp(min=tiny)
    return kept + torch.where(rest_p > tiny, rest_p * (rest_p.clamp(min=tiny).log() - rest_q.log()), 0.0)


def distillation_kl(
    student_BSE: Tensor,
    teacher_BSE: Tensor,
    student_head: nn.Module,
    teacher_head: nn.Module,
    valid_BS: Tensor,
    *,
    top: int,
    chunk: int,
) -> Tensor:
    """Mean KL in nats over valid tokens; ``chunk`` tokens of logits exist at once, recomputed in the backward pass."""
    student_XE, teacher_XE = student_BSE[valid_BS], teacher_BSE[valid_BS]

    def piece(student: Tensor, teacher: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher_head(teacher)
        return top_k_kl(target, student_head(student), top).sum()

    total = student_XE.new_zeros((), dtype=torch.float32)
    for start in range(0, len(student_XE), chunk):
        part = slice(start, start + chunk)
        total = total + checkpoint(piece, student_XE[part], teacher_XE[part], use_reentrant=False)
    return total / max(1, len(student_XE))
