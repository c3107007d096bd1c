"""Teacher-forced comparison of policies with the dense model, on plain text and on retrieval prompts.

Dense is computed once per text; every policy then sees the same tokens, so all figures are paired.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpop.attachment import attach, detach
from kvpop.budget import Budget
from kvpop.core.target import Target, future_target
from kvpop.documents import Documents
from kvpop.models import check_head
from kvpop.ops.sparse_attention.api import Impl
from kvpop.policies import Dense, LayerView, Policy, SequencePass
from kvpop.tasks import RetrievalPrompt, score_retrieval
from kvpop.weights import swapped

# Shapes: S tokens of a text, Q scored positions, V vocabulary, E model width.

HEAD_CHUNK = 256
"""Positions whose logits exist at once."""

MEASURES = ("kl", "agree", "nll", "correct")

BATCH = 4
"""Texts of equal length that go through the model together."""


@dataclass(frozen=True)
class Entry:
    """One line of a comparison: a policy at a budget. ``budget`` is slots per KV head, None if it is not fixed.

    ``weights``: what stands in place of the model's own weights while this policy is measured (``adapter.changed_weights``).
    What it is compared with is the dense model with its own weights, for all entries the same.
    """

    label: str
    budget: int | None
    policy: Policy
    weights: Mapping[str, Tensor] | None = None


@dataclass
class TextScores:
    """Per scored position of every text, in order: KL to dense (nats), top-1 agreement with dense, NLL of the text, and
    whether the likeliest token is the text's own. ``held``, of a policy without fixed slots: of every text the share of its
    tokens that is held at its end, on average over the KV heads of layers without a bound."""

    kl: list[Tensor] = field(default_factory=list)
    agree: list[Tensor] = field(default_factory=list)
    nll: list[Tensor] = field(default_factory=list)
    correct: list[Tensor] = field(default_factory=list)
    held: list[float] = field(default_factory=list)

    def row(self, start: int, bins: int = 4) -> dict[str, Any]:
        """Means over texts and positions, and KL by position."""
        kl, agree, nll, correct = (
            torch.stack([x.mean() for x in values]) for values in (self.kl, self.agree, self.nll, self.correct)
        )
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
            "accuracy": float(correct.mean()),
            "perplexity": float(nll.mean().exp()),
            "kl_by_text": kl.tolist(),
            "agreement_by_text": agree.tolist(),
            "accuracy_by_text": correct.tolist(),
            "by_position": by_position,
            **({"held": sum(self.held) / len(self.held)} if self.held else {}),
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
def hidden_states(model: PreTrainedModel, ids_BS: Tensor, observe: Callable[[LayerView], None] | None = None) -> Tensor:
    """Hidden states [B, S, E] before the LM head of texts of equal length, under the attached policy.

    ``observe`` is called with what each layer did."""
    weight = next(model.parameters())
    ids_BS = ids_BS.to(weight.device)
    documents = Documents.single(ids_BS.shape[0], ids_BS.shape[1], ids_BS.device)
    seq = SequencePass(documents, observe=observe, impl=impl_for(weight))
    return model.get_decoder()(input_ids=ids_BS, use_cache=False, kvpop=seq).last_hidden_state


def impl_for(like: Tensor) -> Impl:
    """How whole sequences attend on a device: FlexAttention on a GPU in up to 32 bits, the reference elsewhere."""
    return "flex" if like.device.type == "cuda" and like.dtype != torch.float64 else "reference"


@torch.no_grad()
def log_probabilities(head: nn.Module, hidden_QE: Tensor) -> Tensor:
    """Log-softmax [Q, V] of an LM head, float32."""
    return head(hidden_QE).float().log_softmax(-1)


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices in groups of equal length, at most ``BATCH`` each, in order of first appearance."""
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    for group in by_length.values():
        for start in range(0, len(group), BATCH):
            yield group[start : start + BATCH]


@contextmanager
def measured(model: PreTrainedModel, entry: Entry) -> Iterator[PreTrainedModel]:
    """The model with the entry's policy attached and its weights in place; its own weights are back at the end."""
    with swapped(model, entry.weights):
        yield attach(model, entry.policy)


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
    shares: list[dict[int, float]] = [{} for _ in entries]
    check_head(model)
    with detached_after(model):
        for group in batches([len(text) for text in texts]):
            ids_BS = torch.stack([texts[i] for i in group])
            dense_BQE = hidden_states(attach(model, Dense()), ids_BS)[:, start:-1]
            for _ in group:
                tick("dense")
            own_head = model.get_output_embeddings()
            hidden, heads = [], []
            for entry, own in zip(entries, shares):
                if isinstance(entry.policy, Dense) and not entry.weights:
                    hidden.append(dense_BQE)
                    heads.append(own_head)
                else:
                    by_layer: list[Tensor] = []

                    def observe(view: LayerView, by_layer: list[Tensor] = by_layer) -> None:
                        if not view.policy.bounded:
                            by_layer.append((view.expiry >= view.k.shape[2]).float().mean((1, 2)))

                    grows = entry.policy.slots is None and not isinstance(entry.policy, Dense)
                    with measured(model, entry):
                        hidden.append(hidden_states(model, ids_BS, observe if grows else None)[:, start:-1])
                        heads.append(copy.deepcopy(own_head) if entry.weights else own_head)
                    own.update(zip(group, torch.stack(by_layer).mean(0).tolist() if by_layer else ()))
                for _ in group:
                    tick(entry.label)
            for row, i in enumerate(group):
                target_Q = texts[i][start + 1 :].to(dense_BQE.device)
                for values in found:
                    values[i] = {name: [] for name in MEASURES}
                for low in range(0, len(target_Q), HEAD_CHUNK):
                    part = slice(low, low + HEAD_CHUNK)
                    dense_QV = log_probabilities(own_head, dense_BQE[row, part])
                    for values, hidden_BQE, head in zip(found, hidden, heads):
                        log_QV = dense_QV if hidden_BQE is dense_BQE else log_probabilities(head, hidden_BQE[row, part])
                        values[i]["kl"].append((dense_QV.exp() * (dense_QV - log_QV)).sum(-1))
                        values[i]["agree"].append((dense_QV.argmax(-1) == log_QV.argmax(-1)).float())
                        values[i]["nll"].append(-log_QV.gather(-1, target_Q[part, None])[:, 0])
                        values[i]["correct"].append((log_QV.argmax(-1) == target_Q[part]).float())
    made = []
    for values, own in zip(found, shares):
        score = TextScores(*([torch.cat(value[name]).cpu() for value in values] for name in MEASURES))  # type: ignore[arg-type]
        score.held = [own[i] for i in sorted(own)]
        made.append(score)
    return made


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
                answers_QV = []
                with measured(model, entry), torch.no_grad():
                    hidden_BSE = hidden_states(model, ids_BS)
                    for i, hidden_SE in zip(group, hidden_BSE):
                        first = min(start for start, _ in prompts[i].answers) - 1  # logits at p predict token p + 1
                        answers_QV.append(model.get_output_embeddings()(hidden_SE[first:]).float().cpu())
                for prompt, logits_QV in zip((prompts[i] for i in group), answers_QV):
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


def compare_recall(
    model: PreTrainedModel,
    texts: Sequence[Tensor],
    entries: Sequence[Entry],
    budget: Budget,
    min_future: int = 128,
    start: int | None = None,
) -> list[dict[str, list[list[float]]]]:
    """Share of the k older tokens that will receive the most attention which each entry still holds, by layer and text.

    Read at the last position whose tokens all have at least ``min_future`` queries behind the window; attention is that of
    the entry's own pass (mean over future queries, Eq. 2, largest of the query heads). Where a policy's heads differ, each is
    asked for as many as it has slots; recall is the mean over heads that have any, NaN without one. Also "held": the mean
    number of tokens that a KV head holds over positions from ``start`` (None: ``budget.slots``) on. Both [layers][texts].
    Detaches at the end.

    Raises ValueError for a text that has no such position behind a full budget.
    """
    results: list[dict[str, list[list[float]]]] = []
    first = budget.slots if start is None else start
    for text in texts:
        if len(text) - 1 - min_future < budget.slots:
            raise ValueError(
                f"a text of {len(text)} tokens is too short: recall at {budget.slots} slots needs "
                f"{budget.slots + min_future + 1}"
            )
    with detached_after(model):
        for entry in entries:
            found: dict[str, list[list[float]]] = {"recall": [], "held": []}
            for text in texts:
                values: dict[str, list[float]] = {"recall": [], "held": []}

                def observe(view: LayerView, values: dict[str, list[float]] = values) -> None:
                    recall, held = _retention(view, budget, min_future, first)
                    values["recall"].append(recall)
                    values["held"].append(held)

                with measured(model, entry):
                    hidden_states(model, text[None], observe)
                for name, by_layer in values.items():
                    found[name].append(by_layer)
            results.append({name: [list(layer) for layer in zip(*by_text)] for name, by_text in found.items()})
    return results


def _retention(view: LayerView, budget: Budget, min_future: int, start: int) -> tuple[float, float]:
    """Recall of one layer on one text, and how many tokens its KV heads hold on average."""
    S = view.k.shape[2]
    mass_HS = future_target(
        view.q, view.k, view.lse, view.documents, scale=view.scale, window=budget.window, target=Target(),
        impl=impl_for(view.k),
    )[0]  # fmt: skip
    q = S - 1 - min_future
    expiry_HS = view.expiry[0].to(mass_HS.device)
    own: Budget = view.policy.budget if view.policy.heads else budget  # type: ignore[assignment]
    shares = []
    for k, mass_S, expiry_S in zip(own.longs(len(mass_HS)), mass_HS, expiry_HS):
        eligible_A = mass_S[own.sinks : q - own.window + 1]
        best_K = eligible_A.topk(min(k, len(eligible_A))).indices + own.sinks
        shares.append((expiry_S[best_K] > q).float().mean())
    recall = torch.stack(shares).nanmean()
    position_S = torch.arange(S, device=expiry_HS.device)
    lives_HS = (expiry_HS.clamp(max=S) - position_S.clamp(min=start)).clamp(min=0)
    return float(recall), float(lives_HS.sum(-1).float().mean() / (S - start))


def interval(values: Sequence[float], seed: int = 0, draws: int = 2000) -> dict[str, float]:
    """The mean of ``values``, one a document, with the 95 % interval of a bootstrap over documents: value, low, high.

    The same seed draws the same documents, so that differences between two policies on the same texts are paired. Raises
    ValueError without values.
    """
    if not len(values):
        raise ValueError("an interval needs at least 1 value, got none")
    x = torch.tensor(list(values), dtype=torch.double)
    picks = torch.randint(len(x), (draws, len(x)), generator=torch.Generator().manual_seed(seed))
    means = x[picks].mean(1)
    low, high = means.quantile(0.025), means.quantile(0.975)
    return {"value": float(x.mean()), "low": float(low), "high": float(high)}
