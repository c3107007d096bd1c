"""The central invariant: at every step the bounded cache holds exactly the set the training mask keeps.

Checked in float64, where near-ties do not fall either way, on tiny random models: held sets at every chunk end, and logits
at every position against a full-length forward under the dense boolean mask.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpop.attachment import attach, attached_policies, cache_argument
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.core.cutoff import oracle_held
from kvpop.core.priority import FixedDecay
from kvpop.policies import DMS, KVpop, Random, RankedLayer, Streaming
from kvpop.policies.base import Heads, LayerShape, Policy
from kvpop.scorers import ConstantScorer
from tests.tiny import VOCAB, dense_masks, expiries, held_by_mask, masked_reference, tiny_model

MODELS = {}


def model_of(family: str, kv_heads: int, groups: int):
    key = (family, kv_heads, groups)
    if key not in MODELS:
        MODELS[key] = tiny_model(family, kv_heads=kv_heads, groups=groups)
    return MODELS[key]


class Fixed(Policy):
    """A constant score of any value, with decay: structural protection must hold whatever the scores are."""

    def __init__(self, budget: Budget, value: float, decay: float, heads: Heads = ()) -> None:
        object.__setattr__(self, "budget", budget)
        object.__setattr__(self, "heads", heads)
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "decay", decay)

    name = "fixed"

    @property
    def slots(self) -> int:
        return self.budget.slots

    def layer(self, shape: LayerShape) -> RankedLayer:
        scorer = ConstantScorer(shape.kv_heads, shape.head_dim, self.value)
        return RankedLayer(shape, self.budget, scorer, FixedDecay(shape.kv_heads, self.decay), heads=self.heads)


def make_policy(kind: str, budget: Budget, heads: Heads = ()) -> Policy:
    if kind.startswith("fixed"):
        return Fixed(budget, float(kind.split(":")[1]), 0.0, heads)
    if kind == "fixed-decay":
        return Fixed(budget, 0.0, -1e-2, heads)
    if kind.startswith("dms"):
        emitted_by = "self" if kind == "dms-self" else "next"
        return DMS(budget.window, ratio=2, sinks=budget.sinks, emitted_by=emitted_by, offset=0.0)
    if kind == "random":
        return Random(budget, seed=3, decay=-1e-2, heads=heads)
    if kind == "streaming":
        return Streaming(budget)
    if kind == "streaming-cache":
        return Streaming(budget, positions="cache")
    step = 3 if kind.endswith("/bucketed") else 1
    return KVpop(budget, scorer=kind.removesuffix("/bucketed"), decay_step=step, heads=heads)


def shake(model, seed: int) -> None:
    """Scores start near zero; make them differ, per head."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for policy in attached_policies(model):
            for p in policy.parameters():
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.5)


KINDS = [
    "mlp", "mlstm", "mlstm-immediate", "mlp+mlstm", "mlp+mlstm/bucketed", "random", "streaming", "streaming-cache",
    "fixed:0", "fixed:inf", "fixed:-inf", "fixed:nan", "dms", "dms-self",
]  # fmt: skip


BY_HEAD = [kind for kind in KINDS if not kind.startswith(("streaming", "dms"))]


@st.composite
def unequal(draw, kv_heads: int, long: int) -> Heads:
    """Long-range slots of the heads of two layers, ``long`` on average: some give of theirs to others."""
    slots = [long] * (2 * kv_heads)
    head = st.integers(0, len(slots) - 1)
    for giver, taker, count in draw(st.lists(st.tuples(head, head, st.integers(1, 6)), max_size=6)):
        count = min(count, slots[giver])
        slots[giver] -= count
        slots[taker] += count
    return tuple(slots[:kv_heads]), tuple(slots[kv_heads:])


def longs(case) -> list[tuple[int, ...]]:
    """Long-range slots of each head of each layer."""
    return [row or (case["budget"].long,) * case["heads"][0] for row in case.get("slots") or ((), ())]


@st.composite
def cases(draw):
    budget = Budget(draw(st.integers(0, 3)), draw(st.integers(1, 6)), draw(st.integers(0, 6)))
    lengths = draw(st.lists(st.integers(1, 3 * budget.slots + 6), min_size=1, max_size=3))
    longest = max(lengths)
    cuts = draw(st.lists(st.integers(1, longest), max_size=5))
    style = draw(st.sampled_from(["chunks", "one by one", "all at once", "prompt then decode"]))
    if style == "one by one":
        bounds = list(range(longest + 1))
    elif style == "all at once":
        bounds = [0, longest]
    elif style == "prompt then decode":
        prompt = draw(st.integers(1, longest))
        bounds = [0, *range(prompt, longest + 1)]
    else:
        bounds = sorted({0, longest, *cuts})
    kind = draw(st.sampled_from(KINDS))
    ranked = not kind.startswith("dms")  # what a gate let go cannot be taken back, and there is no slot to pin
    heads = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 1)]))
    slots = draw(st.one_of(st.just(()), unequal(heads[0], budget.long))) if kind in BY_HEAD else ()
    fewest = min((k for row in slots for k in row), default=budget.long)
    return {
        "kind": kind,
        "budget": budget,
        "lengths": lengths,
        "side": draw(st.sampled_from(["left", "right"])),
        "bounds": bounds,
        "heads": heads,
        "slots": slots,
        "family": draw(st.sampled_from(["llama", "qwen3"])),
        "seed": draw(st.integers(0, 1000)),
        # Positions to pin, per row: at most as many as any head has long-range slots.
        "pinned": [
            draw(st.sets(st.integers(budget.sinks, max(length, budget.sinks + 1)), max_size=fewest))
            if ranked and draw(st.booleans())
            else set()
            for length in lengths
        ],
        # After (or with) every piece: tokens that are taken in and taken back, and how they come.
        "junk": draw(st.one_of(st.just(None), st.tuples(st.integers(1, 7), st.sampled_from(JUNK)))) if ranked else None,
        "spare_reach": draw(st.integers(0, 5)),
    }


JUNK = ["with the piece", "in one call", "one by one"]


def run_case(case) -> None:
    budget, lengths = case["budget"], case["lengths"]
    model = attach(model_of(case["family"], *case["heads"]), make_policy(case["kind"], budget, case.get("slots", ())))
    shake(model, case["seed"])
    generator = torch.Generator().manual_seed(case["seed"])
    rows = [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]
    longest = max(lengths)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        part = slice(longest - len(row), longest) if case["side"] == "left" else slice(0, len(row))
        ids[i, part], mask[i, part] = row, 1
    pinned = case.get("pinned") or [set()] * len(rows)
    reference = []
    for row, pins in zip(rows, pinned):
        marks = torch.tensor([[t in pins for t in range(len(row))]])
        whole, expiry = expiries(model, row[None], pinned=marks if any(pinned) else None)
        if case["kind"] != "streaming-cache":  # attends at other positions: no plain mask describes its logits
            whole = masked_reference(model, row[None], dense_masks(expiry))
        reference.append((whole[0], expiry))

    count, how = case.get("junk") or (0, "")
    cache = BoundedCache(model, rollback=count + case.get("spare_reach", 0) if count else 0)
    if any(pinned):
        cache.pin([[(t, t + 1) for t in sorted(pins)] for pins in pinned])
    padded = bool((mask == 0).any())
    logits = []

    def feed(new: torch.Tensor, real: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        position = (before.sum(-1, keepdim=True) + real.cumsum(-1) - 1).clamp(min=0)
        covered = torch.cat([before, real], 1) if padded or bool((real == 0).any()) else None
        with torch.no_grad():
            return model(
                new, attention_mask=covered, position_ids=position, use_cache=True, **{cache_argument(model): cache}
            ).logits

    for start, stop in zip(case["bounds"], case["bounds"][1:]):
        junk = torch.randint(3, VOCAB, (len(rows), count), generator=generator)
        real = torch.randint(0, 2, junk.shape, generator=generator) if padded else torch.ones_like(junk)
        before = mask[:, :start]
        if how == "with the piece":
            both = torch.cat([ids[:, start:stop], junk], 1), torch.cat([mask[:, start:stop], real], 1)
            logits.append(feed(*both, before)[:, : stop - start])
        else:
            size = 1 if how == "one by one" else max(count, 1)
            for part, marks in zip(junk.split(size, dim=1), real.split(size, dim=1)) if count else ():
                feed(part, marks, before)
                before = torch.cat([before, marks], 1)
            cache.crop(-(count // 2))
            cache.crop(count // 2 - count)
            logits.append(feed(ids[:, start:stop], mask[:, start:stop], mask[:, :start]))
        if how == "with the piece":
            cache.crop(-(count // 3))
            cache.crop(count // 3 - count)
        held = cache.held_positions()
        assert int(cache.get_seq_length()) == stop
        for i, (_, expiry) in enumerate(reference):
            seen = int(mask[i, :stop].sum())
            assert cache.tokens_seen()[i] == seen
            expected = held_by_mask(expiry, seen - 1) if seen else [[[[]] * case["heads"][0]]] * 2
            for layer in range(2):
                assert held[layer][i] == expected[layer][0], (case, stop, i, layer)
                if not case["kind"].startswith("dms"):
                    sizes = [min(seen, budget.sinks + budget.window + k) for k in longs(case)[layer]]
                    assert [len(head) for head in held[layer][i]] == sizes
                assert all(pin in head for head in held[layer][i] for pin in pinned[i] if pin < seen)
    logits = torch.cat(logits, dim=1)
    for i, (expected, _) in enumerate(reference):
        torch.testing.assert_close(logits[i][mask[i].bool()], expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=250)
@given(cases())
def test_cache_holds_what_the_mask_keeps(case):
    """Whatever is pinned, and whatever was taken in and taken back on the way."""
    run_case(case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1), (2, 8, 8)])
def test_every_policy_at_edge_budgets_and_chunk_sizes_around_the_window(kind, sizes):
    budget = Budget(*sizes)
    length = 3 * budget.slots + 3
    for chunk in sorted({1, 3, max(1, budget.window - 1), budget.window, budget.window + 1, length}):
        run_case(
            {
                "kind": kind, "budget": budget, "lengths": [length, max(1, length // 2)], "side": "left",
                "bounds": [*range(0, length, chunk), length], "heads": (2, 2), "family": "llama", "seed": chunk,
            }
        )  # fmt: skip


@pytest.mark.parametrize("kind", BY_HEAD)
@pytest.mark.parametrize(
    ("sizes", "slots"),
    [
        ((0, 1, 1), ((0, 2), (1, 1))),
        ((1, 1, 2), ((0, 0), (1, 7))),
        ((1, 3, 2), ((4, 4), (0, 0))),
        ((2, 8, 8), ((1, 20), (8, 3))),
        ((2, 4, 4), ((7, 1), ())),
    ],
)
def test_heads_of_unequal_sizes_at_edge_budgets_and_chunk_sizes_around_the_window(kind, sizes, slots):
    budget = Budget(*sizes)
    length = budget.sinks + budget.window + 2 * max(max(row, default=0) for row in slots) + 5
    for chunk in sorted({1, 3, max(1, budget.window - 1), budget.window, budget.window + 1, length}):
        run_case(
            {
                "kind": kind, "budget": budget, "slots": slots, "lengths": [length, max(1, length // 2)], "side": "left",
                "bounds": [*range(0, length, chunk), length], "heads": (2, 2), "family": "llama", "seed": chunk,
            }
        )  # fmt: skip


@pytest.mark.parametrize("value", [0.0, math.inf, -math.inf, math.nan])
def test_constant_scores_are_a_sliding_window_with_sinks(value):
    budget = Budget(2, 3, 4)
    model = attach(tiny_model(), Fixed(budget, value, 0.0))
    _, expiry = expiries(model, torch.randint(3, VOCAB, (1, 40)))
    for q in range(40):
        recent = set(range(max(0, q - 6), q + 1)) | set(range(min(2, q + 1)))
        assert held_by_mask(expiry, q) == [[[sorted(recent)] * 2]] * 2


@settings(max_examples=60)
@given(st.data())
def test_expiry_is_the_set_definition_through_a_model(data):
    budget = Budget(data.draw(st.integers(0, 2)), data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4)))
    slots = data.draw(unequal(2, budget.long))
    model = attach(model_of("llama", 2, 2), KVpop(budget, scorer="mlp", heads=slots))
    shake(model, data.draw(st.integers(0, 99)))
    ids = torch.randint(3, VOCAB, (1, 25), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    seen = {}

    def observe(view):
        seen[view.layer] = (view.policy.priority(view.score_NHL)[0].tolist(), view.expiry[0])

    from kvpop.documents import Documents
    from kvpop.policies import SequencePass

    with torch.no_grad():
        model(ids, use_cache=False, kvpop=SequencePass(Documents.single(1, 25), observe=observe))
    for layer, (priority, expiry) in seen.items():
        for h, k in enumerate(slots[layer]):
            own = Budget(budget.sinks, budget.window, k)
            for q in range(25):
                assert {t for t in range(q + 1) if q < expiry[h, t]} == oracle_held(priority[h], own, q)


def test_a_budget_as_long_as_the_text_is_dense():
    ids = torch.randint(3, VOCAB, (2, 30))
    model = tiny_model()
    with torch.no_grad():
        dense = model(ids, use_cache=False).logits
    attach(model, KVpop(Budget(2, 8, 20)))
    sparse, _ = expiries(model, ids)
    torch.testing.assert_close(sparse, dense, rtol=1e-9, atol=1e-9)
