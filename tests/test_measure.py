"""Comparisons with dense: exact where the answer is known, paired, and without side effects."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kvpop.attachment import attach, attached_policies
from kvpop.budget import Budget
from kvpop.measure import BATCH, HEAD_CHUNK, Entry, TextScores, batches, compare_retrieval, compare_texts
from kvpop.policies import Dense, Policy, Random, Streaming
from kvpop.tasks import RetrievalPrompt
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
    for kl, agree, nll in (([0.0, 1.0, 2.0, 3.0], [1.0] * 4, [1.0] * 4), ([4.0, 6.0], [0.0, 1.0], [2.0, 4.0])):
        for values, given in ((score.kl, kl), (score.agree, agree), (score.nll, nll)):
            values.append(torch.tensor(given))
    row = score.row(start=100, bins=2)
    assert row["kl_by_text"] == [1.5, 5.0]
    assert row["kl"] == pytest.approx(3.25)
    assert row["agreement"] == pytest.approx(0.75)
    assert row["perplexity"] == pytest.approx(torch.tensor(2.0).exp().item())
    first, second = row["by_position"]
    assert (first["from"], first["to"], second["from"], second["to"]) == (100, 102, 102, 104)
    assert first["kl"] == pytest.approx((0 + 1 + 4 + 6) / 4)
    assert second["kl"] == pytest.approx((2 + 3) / 2)  # the shorter text has nothing here
    assert first["agreement"] == pytest.approx(3 / 4)


@pytest.mark.parametrize("positions", [1, 3, 4, 10])
def test_bins_cover_every_position_once_also_when_there_are_fewer_than_bins(positions: int) -> None:
    score = TextScores([torch.ones(positions)], [torch.ones(positions)], [torch.ones(positions)])
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
