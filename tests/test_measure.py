"""Comparisons with dense: exact where the answer is known, paired, and without side effects."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kvpop.attachment import attach, attached_policies, cache_argument
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.core import Target
from kvpop.measure import (
    BATCH,
    HEAD_CHUNK,
    Entry,
    TextScores,
    batches,
    compare_recall,
    compare_retrieval,
    compare_texts,
    hidden_states,
    interval,
)
from kvpop.policies import DMS, Dense, LayerView, Oracle, Policy, Random, Streaming
from kvpop.tasks import RetrievalPrompt
from kvpop.weights import AdapterError, base_tensors, swapped
from tests.tiny import VOCAB, tiny_model

BUDGET = Budget(2, 8, 8)


def text(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def plain_logits(model, ids: torch.Tensor, policy: Policy | None = None) -> torch.Tensor:
    """Logits [S, V] of an ordinary forward pass."""
    if policy is not None:
        attach(model, policy)
    with torch.no_grad():
        return model(ids[None], use_cache=False).logits[0]


def test_dense_against_itself_has_kl_zero_and_full_agreement() -> None:
    model = tiny_model()
    (score,) = compare_texts(model, [text(60), text(45, 1)], [Entry("dense", None, Dense())], start=10)
    assert [len(x) for x in score.kl] == [49, 34]
    assert all((x == 0).all() for x in score.kl)
    assert all((x == 1).all() for x in score.agree)


@pytest.mark.parametrize(
    "policy", [Random(Budget(2, 8, 40), seed=1), Streaming(Budget(2, 48, 0))], ids=["random", "streaming"]
)
def test_a_budget_as_long_as_the_text_is_dense_to_rounding(policy: Policy) -> None:
    (score,) = compare_texts(tiny_model(), [text(50)], [Entry("wide", 50, policy)], start=0)
    assert len(score.kl[0]) == 49
    assert score.kl[0].abs().max() < 1e-5
    assert (score.agree[0] == 1).all()


@pytest.mark.parametrize("length", [60, HEAD_CHUNK + 70])
def test_kl_agreement_and_nll_equal_a_direct_computation(length: int) -> None:
    ids, start, policy = text(length), 20, Random(BUDGET, seed=1)
    (score,) = compare_texts(tiny_model(), [ids], [Entry("random", BUDGET.slots, policy)], start=start)
    dense, sparse = plain_logits(tiny_model(), ids), plain_logits(tiny_model(), ids, policy)
    p, q = (x[start:-1].log_softmax(-1) for x in (dense, sparse))
    assert len(score.kl[0]) == length - 1 - start
    torch.testing.assert_close(score.kl[0].double(), (p.exp() * (p - q)).sum(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(score.agree[0], (p.argmax(-1) == q.argmax(-1)).float())
    nll = F.cross_entropy(sparse[start:-1], ids[start + 1 :], reduction="none")
    torch.testing.assert_close(score.nll[0].double(), nll, rtol=1e-4, atol=1e-5)
    assert score.kl[0].mean() > 1e-3  # the comparison is not of equals


def test_entries_share_one_dense_pass_and_do_not_disturb_each_other() -> None:
    model, texts = tiny_model(), [text(60), text(50, 1)]
    entries = [
        Entry("random", BUDGET.slots, Random(BUDGET, seed=1)),
        Entry("dense", None, Dense()),
        Entry("streaming", BUDGET.slots, Streaming(BUDGET)),
    ]
    ticks: list[str] = []
    together = compare_texts(model, texts, entries, 10, ticks.append)
    assert ticks == ["dense", "random", "dense", "streaming"] * 2
    for entry, score in zip(entries, together):
        (alone,) = compare_texts(model, texts, [entry], 10)
        for mine, theirs in zip(score.kl + score.nll, alone.kl + alone.nll):
            assert torch.equal(mine, theirs)


def test_a_row_averages_texts_and_bins_positions() -> None:
    score = TextScores()
    for kl, agree, nll, correct in (
        ([0.0, 1.0, 2.0, 3.0], [1.0] * 4, [1.0] * 4, [0.0, 1.0, 1.0, 1.0]), ([4.0, 6.0], [0.0, 1.0], [2.0, 4.0], [0.0, 0.0]),
    ):  # fmt: skip
        for values, given in ((score.kl, kl), (score.agree, agree), (score.nll, nll), (score.correct, correct)):
            values.append(torch.tensor(given))
    row = score.row(start=100, bins=2)
    assert row["kl_by_text"] == [1.5, 5.0]
    assert row["kl"] == pytest.approx(3.25)
    assert row["agreement"] == pytest.approx(0.75)
    assert row["accuracy_by_text"] == [0.75, 0.0]
    assert row["accuracy"] == pytest.approx(0.375)
    assert row["perplexity"] == pytest.approx(torch.tensor(2.0).exp().item())
    first, second = row["by_position"]
    assert (first["from"], first["to"], second["from"], second["to"]) == (100, 102, 102, 104)
    assert first["kl"] == pytest.approx((0 + 1 + 4 + 6) / 4)
    assert second["kl"] == pytest.approx((2 + 3) / 2)  # the shorter text has nothing here
    assert first["agreement"] == pytest.approx(3 / 4)


@pytest.mark.parametrize("positions", [1, 3, 4, 10])
def test_bins_cover_every_position_once_also_when_there_are_fewer_than_bins(positions: int) -> None:
    score = TextScores(*([torch.ones(positions)] for _ in range(4)))
    bins = score.row(start=5)["by_position"]
    edges = [b["from"] for b in bins] + [bins[-1]["to"]]
    assert edges[0] == 5
    assert edges[-1] == 5 + positions
    assert edges == sorted(set(edges))
    assert all(b["to"] == following for b, following in zip(bins, edges[1:]))


def test_a_text_without_scored_positions_is_refused_before_any_work() -> None:
    ticks: list[str] = []
    with pytest.raises(ValueError, match="11 tokens has nothing to score from position 10"):
        compare_texts(tiny_model(), [text(60), text(11)], [Entry("dense", None, Dense())], 10, ticks.append)
    assert ticks == []
    with pytest.raises(ValueError, match="start must be at least 0 tokens, got -1"):
        compare_texts(tiny_model(), [text(60)], [Entry("dense", None, Dense())], -1)


class Refused(Policy):
    name, slots = "refused", 1

    def layer(self, shape):
        raise ValueError("no such layer")


@pytest.mark.parametrize("broken", [False, True])
def test_the_model_is_as_before_also_after_an_error(broken: bool) -> None:
    model, ids = tiny_model(), text(40)
    before = plain_logits(model, ids)
    entries = [Entry("random", BUDGET.slots, Refused() if broken else Random(BUDGET))]
    if broken:
        with pytest.raises(ValueError, match="no such layer"):
            compare_texts(model, [ids], entries, 5)
    else:
        compare_texts(model, [ids], entries, 5)
    assert attached_policies(model) == []
    assert torch.equal(plain_logits(model, ids), before)


class Stop(Exception):
    pass


def test_grad_mode_is_not_leaked_by_a_comparison_that_stops_early() -> None:
    """The mode is on in every callback, after an exception from one, and at the end."""
    model = tiny_model()
    modes: list[bool] = []

    def stop(label: str) -> None:
        modes.append(torch.is_grad_enabled())
        if label == "random":
            raise Stop

    with pytest.raises(Stop):
        compare_texts(model, [text(40)], [Entry("random", BUDGET.slots, Random(BUDGET))], 5, stop)
    with pytest.raises(Stop):
        compare_retrieval(model, [retrieval_prompt(0, "x")], [Entry("random", BUDGET.slots, Random(BUDGET))], stop)
    assert modes == [True] * 3
    assert torch.is_grad_enabled()
    assert attached_policies(model) == []


def test_groups_hold_equal_lengths_and_every_index_once() -> None:
    lengths = [5, 7, 5, 5, 7, 5, 5, 9]
    groups = list(batches(lengths))
    assert sorted(i for group in groups for i in group) == list(range(8))
    assert all(len(group) <= BATCH and len({lengths[i] for i in group}) == 1 for group in groups)
    assert len(groups) == 4


def test_texts_that_share_a_batch_score_as_alone_and_stay_in_order() -> None:
    texts = [text(60 - 15 * (i % 2), seed=i) for i in range(2 * BATCH + 2)]
    entries = [Entry("dense", None, Dense()), Entry("random", BUDGET.slots, Random(BUDGET, seed=1))]
    ticks: list[str] = []
    together = compare_texts(tiny_model(), texts, entries, 10, ticks.append)
    assert sorted(ticks) == sorted(["dense", "dense", "random"] * len(texts))
    for i, ids in enumerate(texts):
        alone = compare_texts(tiny_model(), [ids], entries, 10)
        for mine, theirs in zip(together, alone):
            assert len(mine.kl[i]) == len(ids) - 11
            torch.testing.assert_close(mine.kl[i], theirs.kl[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(mine.agree[i], theirs.agree[0])
            torch.testing.assert_close(mine.nll[i], theirs.nll[0], rtol=1e-5, atol=1e-6)


def test_what_a_policy_without_a_budget_held_is_what_its_cache_holds() -> None:
    texts = [text(60 - 15 * (i % 2), seed=i) for i in range(5)]
    gates = DMS(window=5, ratio=2.0, sinks=1, gate="native", offset=0.0)  # whose gates are the model's own
    entries = [Entry("dense", None, Dense()), Entry("random", BUDGET.slots, Random(BUDGET)), Entry("dms", None, gates)]
    model = tiny_model()
    scores = compare_texts(model, texts, entries, 10)
    assert [score.held for score in scores[:2]] == [[], []]
    attach(model, gates)
    for ids, share in zip(texts, scores[2].held, strict=True):
        cache = BoundedCache(model)
        with torch.no_grad():
            model(input_ids=ids[None], **{cache_argument(model): cache})
        assert share == pytest.approx(cache.tokens_held(0) / len(ids))
    assert scores[2].row(10)["held"] == pytest.approx(sum(scores[2].held) / 5)


def retrieval_prompt(seed: int, task: str) -> RetrievalPrompt:
    return RetrievalPrompt(text(60, seed).tolist(), [(40, 43), (50, 54)], ["a", "b"], [0.25, 0.75], task)


def test_retrieval_scores_the_tokens_of_each_span_under_each_policy() -> None:
    prompts = [retrieval_prompt(0, "one"), retrieval_prompt(1, "two"), retrieval_prompt(2, "one")]
    entries = [Entry("dense", None, Dense()), Entry("random", BUDGET.slots, Random(BUDGET, seed=1))]
    ticks: list[str] = []
    model = tiny_model()
    results = compare_retrieval(model, prompts, entries, ticks.append)
    assert sorted(ticks) == ["dense"] * 3 + ["random"] * 3
    assert attached_policies(model) == []
    for entry, by_task in zip(entries, results):
        assert {task: score.row()["answers"] for task, score in by_task.items()} == {"one": 4, "two": 2}
        expected = []
        for prompt in (prompts[0], prompts[2]):
            ids = torch.tensor(prompt.tokens)
            logits = plain_logits(tiny_model(), ids, entry.policy)
            for start, end in prompt.answers:
                expected.append(float(F.cross_entropy(logits[start - 1 : end - 1], ids[start:end])))
        assert by_task["one"].nll == pytest.approx(expected, rel=1e-5)
        assert by_task["one"].depth == [0.25, 0.75, 0.25, 0.75]
        assert by_task["one"].length == [60] * 4
        assert by_task["one"].row()["nll"] == pytest.approx(sum(expected) / 4)
    assert results[0]["one"].nll != results[1]["one"].nll


def test_retrieval_is_exact_where_the_model_says_the_answer_itself() -> None:
    """Answers written by greedy decoding are exact; changing their last token makes them wrong."""
    model, ids = tiny_model(), text(40)
    for _ in range(4):
        ids = torch.cat([ids, plain_logits(model, ids)[-1:].argmax(-1)])
    right = RetrievalPrompt(ids.tolist(), [(40, 44)], ["x"], [0.5], "said")
    wrong = RetrievalPrompt([*ids[:-1].tolist(), (int(ids[-1]) + 1) % VOCAB], [(40, 44)], ["x"], [0.5], "changed")
    (by_task,) = compare_retrieval(model, [right, wrong], [Entry("dense", None, Dense())])
    assert by_task["said"].row()["exact"] == 1
    assert by_task["changed"].row()["exact"] == 0


def other_weights(seed: int = 7, only: str = "") -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in base_tensors(tiny_model(seed=seed)).items() if only in n}


@pytest.mark.parametrize("only", ["", "q_proj", "lm_head"])
def test_an_entry_with_weights_is_measured_with_them_against_the_dense_original(only: str) -> None:
    """Against logits of two models held apart: every part counts, the head included."""
    ids, start, weights = text(60), 10, other_weights(only=only)
    changed = tiny_model()
    changed.load_state_dict(weights, strict=False)
    policies = {"random": Random(BUDGET, seed=1), "dense": Dense()}
    entries = [Entry(name, None, policy, weights) for name, policy in policies.items()]
    model = tiny_model()
    scores = compare_texts(model, [ids], [*entries, Entry("own", None, Dense())], start)
    p = plain_logits(tiny_model(), ids)[start:-1].log_softmax(-1)
    for (name, policy), score in zip(policies.items(), scores):
        q = plain_logits(changed, ids, policy)[start:-1].log_softmax(-1)
        torch.testing.assert_close(score.kl[0].double(), (p.exp() * (p - q)).sum(-1), rtol=1e-4, atol=1e-5)
        nll = F.nll_loss(q, ids[start + 1 :], reduction="none")
        torch.testing.assert_close(score.nll[0].double(), nll, rtol=1e-4, atol=1e-5)
        assert score.kl[0].mean() > 1e-3, name
    assert (scores[2].kl[0] == 0).all()
    prompt = retrieval_prompt(0, "one")
    (by_task,) = compare_retrieval(model, [prompt], entries[:1])
    tokens = torch.tensor(prompt.tokens)
    logits = plain_logits(changed, tokens, policies["random"])
    expected = [float(F.cross_entropy(logits[a - 1 : b - 1], tokens[a:b])) for a, b in prompt.answers]
    assert by_task["one"].nll == pytest.approx(expected, rel=1e-5)


def test_weights_are_swapped_in_and_the_very_same_tensors_come_back_also_after_errors() -> None:
    model = tiny_model()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    own = base_tensors(model)
    before = {name: (t.data_ptr(), t.detach().clone()) for name, t in own.items()}
    weights = {"model.embed_tokens.weight": torch.ones(VOCAB, 24), "model.norm.weight": torch.zeros(24)}
    with swapped(model, weights):
        assert model.lm_head.weight.dtype == torch.float64
        assert (model.lm_head.weight == 1).all()
        assert (model.model.norm.weight == 0).all()
    with pytest.raises(Stop), swapped(model, weights):
        raise Stop
    with swapped(model, None):
        pass
    with (
        pytest.raises(AdapterError, match=r"unexpected tensors \['nowhere'\]"),
        swapped(model, {"nowhere": torch.ones(1)}),
    ):
        pass
    wrong = {"model.norm.weight": torch.ones(24), "model.embed_tokens.weight": torch.ones(2, 2)}
    with (
        pytest.raises(AdapterError, match=r"has shape \(2, 2\), but this model needs \(61, 24\)"),
        swapped(model, wrong),
    ):
        pass
    for name, tensor in base_tensors(model).items():
        assert (tensor is own[name], tensor.data_ptr()) == (True, before[name][0])
        assert torch.equal(tensor, before[name][1])
    assert (weights["model.norm.weight"] == 0).all()


@pytest.mark.parametrize("broken", [False, True])
def test_the_model_is_as_before_also_with_weights(broken: bool) -> None:
    model, ids = tiny_model(), text(40)
    before = plain_logits(model, ids)
    entry = Entry("x", BUDGET.slots, Refused() if broken else Random(BUDGET), other_weights())
    for compare in (
        lambda: compare_texts(model, [ids], [entry], 5),
        lambda: compare_retrieval(model, [retrieval_prompt(0, "x")], [entry]),
    ):
        if broken:
            with pytest.raises(ValueError, match="no such layer"):
                compare()
        else:
            compare()
        assert attached_policies(model) == []
        assert torch.equal(plain_logits(model, ids), before)


# Recall and held tokens, intervals


def test_recall_and_held_are_those_of_a_direct_count() -> None:
    budget, S, future = Budget(2, 8, 10), 80, 20
    model, ids = tiny_model(), text(S)
    entries = [
        Entry("streaming", 20, Streaming(budget)),
        Entry("oracle", 20, Oracle(budget, Target(lse="sparse"), decay=0.0)),
        Entry("dense", None, Dense()),
    ]
    found = compare_recall(model, [ids], entries, budget, min_future=future)
    for entry, got in zip(entries, found):
        views: list[LayerView] = []
        attach(model, entry.policy)
        hidden_states(model, ids[None], views.append)
        q = S - 1 - future
        for layer, view in enumerate(views):
            shares, held = [], []
            for h in range(view.k.shape[1]):
                G = view.q.shape[1] // view.k.shape[1]
                p = (
                    (view.q[0, h * G : (h + 1) * G] @ view.k[0, h].T) * view.scale
                    - view.lse[0, h * G : (h + 1) * G, :, None]
                ).exp()
                mass = {
                    t: max(p[g, t + 8 :, t].sum().item() / (S - t - 8) for g in range(G)) for t in range(2, q - 8 + 1)
                }
                best = sorted(mass, key=lambda t: mass[t])[-10:]
                expiry = view.expiry[0, h].tolist()
                shares.append(sum(expiry[t] > q for t in best) / 10)
                held.append(sum(t <= d < expiry[t] for t in range(S) for d in range(20, S)) / (S - 20))
            assert got["recall"][layer][0] == pytest.approx(sum(shares) / len(shares), abs=1e-6)
            assert got["held"][layer][0] == pytest.approx(sum(held) / len(held), abs=1e-4)
    assert found[0]["held"] == [[20.0], [20.0]]
    assert found[2]["recall"] == [[1.0], [1.0]]


@pytest.mark.parametrize("heads", [((3, 17), (20, 0)), ((0, 0), (10, 30))])
def test_recall_of_unequal_heads_asks_each_for_as_many_tokens_as_it_has_slots(heads) -> None:
    budget, S, future = Budget(2, 8, 10), 80, 20
    model, ids, policy = tiny_model(), text(S), Random(budget, seed=1, heads=heads)
    (got,) = compare_recall(model, [ids], [Entry("random", 20, policy)], budget, min_future=future)
    views: list[LayerView] = []
    attach(model, policy)
    hidden_states(model, ids[None], views.append)
    q = S - 1 - future
    for layer, view in enumerate(views):
        shares, held = [], []
        for h, k in enumerate(heads[layer]):
            p = (
                (view.q[0, 2 * h : 2 * h + 2] @ view.k[0, h].T) * view.scale - view.lse[0, 2 * h : 2 * h + 2, :, None]
            ).exp()
            mass = {t: max(p[g, t + 8 :, t].sum().item() / (S - t - 8) for g in range(2)) for t in range(2, q - 7)}
            expiry = view.expiry[0, h].tolist()
            if k:
                shares.append(sum(expiry[t] > q for t in sorted(mass, key=lambda t: mass[t])[-k:]) / k)
            held.append(sum(t <= d < expiry[t] for t in range(S) for d in range(20, S)) / (S - 20))
        expected = sum(shares) / len(shares) if shares else float("nan")
        assert got["recall"][layer][0] == pytest.approx(expected, abs=1e-6, nan_ok=True)
        assert got["held"][layer][0] == pytest.approx(sum(held) / len(held), abs=1e-4)


def test_recall_needs_a_text_that_fills_the_budget_with_a_future() -> None:
    with pytest.raises(ValueError, match="a text of 40 tokens is too short: recall at 20 slots needs 41"):
        compare_recall(tiny_model(), [text(40)], [Entry("dense", None, Dense())], Budget(2, 8, 10), min_future=20)


def test_an_interval_holds_the_mean_narrows_with_more_documents_and_is_the_same_for_one_seed() -> None:
    few = interval([0.0, 1.0, 2.0, 3.0])
    assert few["low"] < few["value"] == 1.5 < few["high"]
    many = interval([0.0, 1.0, 2.0, 3.0] * 25)
    assert many["high"] - many["low"] < few["high"] - few["low"]
    assert interval([0.0, 1.0, 2.0, 3.0]) == few
    shifted = interval([10.0, 11.0, 12.0, 13.0])  # the same documents are drawn: differences are paired
    assert shifted["low"] - few["low"] == pytest.approx(10)
    assert interval([2.0]) == {"value": 2.0, "low": 2.0, "high": 2.0}
    with pytest.raises(ValueError, match="at least 1 value, got none"):
        interval([])
