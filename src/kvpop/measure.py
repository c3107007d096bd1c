"""Teacher-forced comparison of policies with the dense model, on plain text and on retrieval prompts.

Dense is computed once per text; every policy then sees the same tokens, so all figures are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpop.attachment import attach, detach
from kvpop.documents import Documents
from kvpop.models import check_head
from kvpop.policies import Dense, Policy, SequencePass
from kvpop.tasks import RetrievalPrompt, score_retrieval

# Shapes: S tokens of a text, Q scored positions, V vocabulary, E model width.

HEAD_CHUNK = 256
"""Positions whose logits exist at once."""

BATCH = 4
"""Texts of equal length that go through the model together."""


@dataclass(frozen=True)
class Entry:
    """One line of a comparison: a policy at a budget. ``budget`` is slots per KV head, None for dense."""

    label: str
    budget: int | None
    policy: Policy


@dataclass
class TextScores:
    """Per scored position of every text, in order: KL to dense (nats), top-1 agreement with dense, NLL of the text."""

    kl: list[Tensor] = field(default_factory=list)
    agree: list[Tensor] = field(default_factory=list)
    nll: list[Tensor] = field(default_factory=list)

    def row(self, start: int, bins: int = 4) -> dict[str, Any]:
        """Means over texts and positions, and KL by position."""
        kl, agree, nll = (torch.stack([x.mean() for x in values]) for values in (self.kl, self.agree, self.nll))
        longest = max(len(x) for x in self.kl)
        edges = [round(longest * i / bins) for i in range(bins + 1)]
        by_position = [
            {
                "from": start + low,
                "to": start + high,
                "kl": float(torch.cat([x[low:high] for x in self.kl]).mean()),
                "agreement": float(torch.cat([x[low:high] for x in self.agree]).mean()),
            }
            for low, high in pairwise(edges)
            if high > low
        ]
        return {
            "kl": float(kl.mean()),
            "agreement": float(agree.mean()),
            "perplexity": float(nll.mean().exp()),
            "kl_by_text": kl.tolist(),
            "agreement_by_text": agree.tolist(),
            "by_position": by_position,
        }


@dataclass
class RetrievalScores:
    """Exact matches and negative log-likelihoods (nats a token) of the answers of one task."""

    exact: list[bool] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    depth: list[float] = field(default_factory=list)
    length: list[int] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        count = max(1, len(self.exact))
        return {"exact": sum(self.exact) / count, "nll": sum(self.nll) / count, "answers": len(self.exact)}


@torch.no_grad()
def hidden_states(model: PreTrainedModel, ids_BS: Tensor) -> Tensor:
    """Hidden states [B, S, E] before the LM head of texts of equal length, under the attached policy."""
    ids_BS = ids_BS.to(next(model.parameters()).device)
    seq = SequencePass(Documents.single(ids_BS.shape[0], ids_BS.shape[1], ids_BS.device))
    return model.get_decoder()(input_ids=ids_BS, use_cache=False, kvpop=seq).last_hidden_state


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, hidden_QE: Tensor) -> Tensor:
    """Log-softmax [Q, V] of the LM head, float32."""
    return model.get_output_embeddings()(hidden_QE).float().log_softmax(-1)


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices in groups of equal length, at most ``BATCH`` each, in order of first appearance."""
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    for group in by_length.values():
        for start in range(0, len(group), BATCH):
            yield group[start : start + BATCH]


@contextmanager
def detached_after(model: PreTrainedModel) -> Iterator[None]:
    """Whatever is attached inside comes off at the end, also after an error."""
    try:
        yield
    finally:
        detach(model)


def compare_texts(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    entries: Sequence[Entry],
    start: int,
    tick: Callable[[str], None] = lambda what: None,
) -> list[TextScores]:
    """Score every entry on every text (token ids [S]) at positions ``start`` to S - 2. Detaches at the end.

    Raises ValueError for start < 0 and for a text that is not longer than ``start`` + 1.
    """
    if start < 0:
        raise ValueError(f"start must be at least 0 tokens, got {start}")
    for text in texts:
        if len(text) <= start + 1:
            raise ValueError(f"a text of {len(text)} tokens has nothing to score from position {start} on")
    found: list[list[dict[str, list[Tensor]]]] = [[{} for _ in texts] for _ in entries]
    check_head(model)
    with detached_after(model):
        for group in batches([len(text) for text in texts]):
            ids_BS = torch.stack([texts[i] for i in group])
            dense_BQE = hidden_states(attach(model, Dense()), ids_BS)[:, start:-1]
            for _ in group:
                tick("dense")
            hidden = []
            for entry in entries:
                dense = isinstance(entry.policy, Dense)
                hidden.append(dense_BQE if dense else hidden_states(attach(model, entry.policy), ids_BS)[:, start:-1])
                for _ in group:
                    tick(entry.label)
            for row, i in enumerate(group):
                target_Q = texts[i][start + 1 :].to(dense_BQE.device)
                for values in found:
                    values[i] = {name: [] for name in ("kl", "agree", "nll")}
                for low in range(0, len(target_Q), HEAD_CHUNK):
                    part = slice(low, low + HEAD_CHUNK)
                    dense_QV = log_probabilities(model, dense_BQE[row, part])
                    for values, hidden_BQE in zip(found, hidden):
                        log_QV = (
                            dense_QV if hidden_BQE is dense_BQE else log_probabilities(model, hidden_BQE[row, part])
                        )
                        values[i]["kl"].append((dense_QV.exp() * (dense_QV - log_QV)).sum(-1))
                        values[i]["agree"].append((dense_QV.argmax(-1) == log_QV.argmax(-1)).float())
                        values[i]["nll"].append(-log_QV.gather(-1, target_Q[part, None])[:, 0])
    return [
        TextScores(*([torch.cat(value[name]).cpu() for value in values] for name in ("kl", "agree", "nll")))
        for values in found
    ]


def compare_retrieval(
    model: PreTrainedModel,
    prompts: Sequence[RetrievalPrompt],
    entries: Sequence[Entry],
    tick: Callable[[str], None] = lambda what: None,
) -> list[dict[str, RetrievalScores]]:
    """Teacher-forced answers of every prompt under every entry, grouped by task. Detaches at the end."""
    results: list[dict[str, RetrievalScores]] = [{} for _ in entries]
    check_head(model)
    with detached_after(model):
        for group in batches([prompt.length for prompt in prompts]):
            ids_BS = torch.tensor([prompts[i].tokens for i in group])
            for entry, by_task in zip(entries, results):
                hidden_BSE = hidden_states(attach(model, entry.policy), ids_BS)
                for prompt, hidden_SE in zip((prompts[i] for i in group), hidden_BSE):
                    first = min(start for start, _ in prompt.answers) - 1  # logits at p predict token p + 1
                    with torch.no_grad():
                        logits_QV = model.get_output_embeddings()(hidden_SE[first:]).float().cpu()
                    tasks = prompt.tasks or (prompt.task,) * len(prompt.answers)
                    for span, depth, task in zip(prompt.answers, prompt.depths, tasks):
                        score = by_task.setdefault(task, RetrievalScores())
                        exact, nll = score_retrieval(logits_QV, prompt.tokens, span)
                        score.exact.append(exact)
                        score.nll.append(nll)
                        score.depth.append(depth)
                        score.length.append(prompt.length)
                    tick(entry.label)
    return results
