"""DMS: gates in training and in generation, and a store whose memory follows them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvpop
from kvpop.attachment import attach, attached_policies, cache_argument
from kvpop.cache import BoundedCache
from kvpop.documents import Documents
from kvpop.ops.sparse_attention import NEVER, keep_mask
from kvpop.policies import DMS, GateSampling, LayerShape, LayerView, SequencePass
from kvpop.policies.dms import (
    DMSLayer,
    closed_counts,
    gate_loss,
    relaxed,
    seeded_uniform,
    shortfall,
    straight_through,
    target_at,
)  # fmt: skip
from kvpop.slots import PagedSlots
from tests.tiny import VOCAB, dense_masks, expiries, held_by_mask, masked_reference, tiny_model

# Shapes: B batch, R = H * G query heads, H KV heads, S sequence, D head dim.

GATES = [("mlp", "next"), ("mlp", "self"), ("native", "next"), ("native", "self")]


def shaken(model, seed: int):
    """Gates of about any value, half of them closed: weights that make scores differ, per head."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for policy in attached_policies(model):
            for p in policy.parameters():
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.5)
    return model


def layer_of(policy: DMS, kv_heads: int = 2, groups: int = 2, head_dim: int = 4, seed: int = 0) -> DMSLayer:
    layer = policy.layer(LayerShape(layer=0, heads=kv_heads * groups, kv_heads=kv_heads, head_dim=head_dim)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return layer


def qkv(B: int, H: int, G: int, S: int, D: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H * G, S, D), (B, H, S, D), (B, H, S, D)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def observed(layer: DMSLayer, q: Tensor, k: Tensor, v: Tensor, docs: Documents, gates=None) -> tuple[Tensor, LayerView]:
    views: list[LayerView] = []
    out = layer.attend_sequence(q, k, v, 0.5, SequencePass(docs, observe=views.append, gates=gates))
    return out, views[0]


def forward(model, cache: BoundedCache, ids: Tensor, before: Tensor, mask: Tensor, padded: bool = False) -> Tensor:
    position = (before.sum(-1, keepdim=True) + mask.cumsum(-1) - 1).clamp(min=0)
    covered = torch.cat([before, mask], 1) if padded else None
    with torch.no_grad():
        return model(
            ids, attention_mask=covered, position_ids=position, use_cache=True, **{cache_argument(model): cache}
        ).logits


MODELS: dict = {}


def model_of(kv_heads: int, groups: int):
    return MODELS.setdefault((kv_heads, groups), tiny_model("qwen3", kv_heads=kv_heads, groups=groups))


# What is held, and what is attended to.


@st.composite
def cases(draw):
    gate, emitted_by = draw(st.sampled_from(GATES))
    policy = DMS(
        window=draw(st.integers(1, 6)), ratio=2, sinks=draw(st.integers(0, 3)), gate=gate, emitted_by=emitted_by,
        offset=0.0, threshold=draw(st.sampled_from([0.0, 0.0, 0.2, math.inf, -math.inf])),
    )  # fmt: skip
    lengths = draw(st.lists(st.integers(1, 26), min_size=1, max_size=3))
    longest = max(lengths)
    style = draw(st.sampled_from(["chunks", "one by one", "all at once", "prompt then decode"]))
    bounds = {
        "chunks": lambda: sorted({0, longest, *draw(st.lists(st.integers(1, longest), max_size=5))}),
        "one by one": lambda: list(range(longest + 1)),
        "all at once": lambda: [0, longest],
        "prompt then decode": lambda: [0, *range(draw(st.integers(1, longest)), longest + 1)],
    }[style]()
    return {
        "policy": policy, "lengths": lengths, "bounds": bounds, "side": draw(st.sampled_from(["left", "right"])),
        "heads": draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)])), "seed": draw(st.integers(0, 1000)),
        "page": draw(st.sampled_from([1, 2, 5, 32])),
    }  # fmt: skip


def run_case(case) -> None:
    policy, lengths = case["policy"], case["lengths"]
    model = shaken(attach(model_of(*case["heads"]), policy), case["seed"])
    generator = torch.Generator().manual_seed(case["seed"])
    rows = [torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths]
    longest = max(lengths)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        part = slice(longest - len(row), longest) if case["side"] == "left" else slice(0, len(row))
        ids[i, part], mask[i, part] = row, 1
    reference = []
    for row in rows:
        whole, expiry = expiries(model, row[None])
        if policy.gate == "mlp":  # the native gate's channel is zeroed, which no mask does: see test_attention
            whole = masked_reference(model, row[None], dense_masks(expiry))
        reference.append((whole[0], expiry))

    cache = BoundedCache(model)
    cache.allocate(len(rows))
    for layer, store in zip(cache.bounded_layers, cache.stores):
        empty = torch.zeros(len(rows), case["heads"][0], 0, 8, dtype=torch.float64)
        layer.slots = PagedSlots(store.window, store.sinks, store.gate, store.lag, empty, empty, page=case["page"])
    logits = []
    for start, stop in zip(case["bounds"], case["bounds"][1:]):
        part = slice(start, stop)
        logits.append(forward(model, cache, ids[:, part], mask[:, :start], mask[:, part], bool((mask == 0).any())))
        held = cache.held_positions()
        for i, (_, expiry) in enumerate(reference):
            seen = int(mask[i, :stop].sum())
            assert cache.tokens_seen()[i] == seen
            expected = held_by_mask(expiry, seen - 1) if seen else [[[[]] * case["heads"][0]]] * 2
            assert [layer[i] for layer in held] == [layer[0] for layer in expected], (case, stop, i)
    for i, (expected, _) in enumerate(reference):
        torch.testing.assert_close(
            torch.cat(logits, dim=1)[i][mask[i].bool()], expected, rtol=1e-9, atol=1e-9, msg=str(case)
        )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_cache_holds_what_the_mask_keeps(case) -> None:
    """Held sets at every step and logits at every position, any gates, windows, prompts, chunkings and paddings."""
    run_case(case)


@pytest.mark.parametrize(("gate", "emitted_by"), GATES)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("window", [1, 4])
def test_padded_rows_at_chunk_sizes_around_the_window(gate, emitted_by, side, window) -> None:
    policy = DMS(window=window, ratio=2, sinks=1, gate=gate, emitted_by=emitted_by, offset=0.0)
    for chunk in (2, 3, 5):
        run_case(
            {
                "policy": policy, "lengths": [21, 14, 1], "bounds": [*range(0, 21, chunk), 21], "side": side,
                "heads": (2, 2), "seed": chunk, "page": 3,
            }
        )  # fmt: skip


@pytest.mark.parametrize(("gate", "emitted_by"), GATES)
def test_expiry_is_the_definition_also_in_packed_documents(gate, emitted_by) -> None:
    policy = DMS(window=3, ratio=2, sinks=2, gate=gate, emitted_by=emitted_by, offset=0.0, threshold=0.1)
    layer = layer_of(policy)
    (q, k, v), lengths = qkv(2, 2, 2, 20), [[6, 1, 9], [12, 8]]
    ids = torch.full((2, 20), -1)
    for b, row in enumerate(lengths):
        ids[b, : sum(row)] = torch.arange(len(row)).repeat_interleave(torch.tensor(row))
    _, view = observed(layer, q, k, v, Documents(ids))
    logits = layer.logits(q, k, v)
    closed_at_all = 0
    for b, row in enumerate(lengths):
        start = 0
        for length in row:
            end = start + length
            for h in range(2):
                for t in range(start, end):
                    read = t + 1 if emitted_by == "next" else t
                    closed = t - start >= 2 and read < end and bool(logits[b, h, read] > 0.1)
                    assert view.expiry[b, h, t] == (min(t + 3, end) if closed else end)
                    assert view.closed_BHS[b, h, t] == closed
                    closed_at_all += closed
            start = end
        assert (view.expiry[b, :, start:] == 0).all()
        assert (view.closed_BHS[b, :, start:] == 0).all()
    assert closed_at_all > 10


def dense_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    G = q.shape[1] // k.shape[1]
    k, v, keep = (x.repeat_interleave(G, dim=1) for x in (k, v, keep))
    logits = (0.5 * q @ k.mT + bias).masked_fill(~keep, -torch.inf)
    return logits.softmax(-1) @ v


@pytest.mark.parametrize("gate", ["mlp", "native"])
def test_attention_is_masked_and_the_native_channel_zeroed(gate) -> None:
    layer = layer_of(DMS(window=3, ratio=2, sinks=1, gate=gate, offset=0.0))
    q, k, v = qkv(2, 2, 3, 15)
    out, view = observed(layer, q, k, v, Documents.single(2, 15))
    seen = q.clone()
    if gate == "native":
        seen[:, [0, 3], :, -1] = 0.0
        torch.testing.assert_close(layer.logits(q, k, v), 100 * q[:, [0, 3], :, -1])
    index = torch.arange(15)
    keep = keep_mask(view.expiry, index.expand(2, -1), index.expand(2, 2, -1))
    assert not keep[:, :, 14].all()
    torch.testing.assert_close(out, dense_attention(seen, k, v, keep))
    assert torch.equal(view.q, seen)
    slots = layer.new_slots(k, v)
    steps = [slots.attend(*(x[:, :, t : t + 1] for x in (q, k, v)), None, 0.5) for t in range(15)]
    torch.testing.assert_close(torch.cat(steps, 2), out)
    torch.testing.assert_close(layer.new_slots(k, v).attend(q, k, v, None, 0.5), out)


# Training.


@pytest.mark.parametrize(("gate", "emitted_by"), GATES)
def test_relaxed_attention_and_its_gradients(gate, emitted_by) -> None:
    """Against the formula written out over all pairs, gradients of the gate and of q, k, v included."""
    w, sinks, S = 3, 2, 14
    layer = layer_of(DMS(window=w, ratio=2, sinks=sinks, gate=gate, emitted_by=emitted_by, offset=0.3, scale=2.0))
    leaves = [x.requires_grad_() for x in qkv(2, 2, 2, S)]
    docs = Documents(torch.arange(2).repeat_interleave(torch.tensor([5, 9])).expand(2, -1))
    gates = GateSampling(0.7, seeded_uniform(3))
    out, view = observed(layer, *leaves, docs, gates)

    q, k, v = leaves
    u = seeded_uniform(3)(0, (2, 2, S)).double()
    if gate == "native":
        logit = 2.0 * q[:, ::2, :, -1] - 0.3
        q = torch.cat([q[..., :-1], q[..., -1:] * torch.tensor([0.0, 1, 0, 1])[:, None, None]], -1)
    else:
        x = torch.cat([k, v], -1).detach()
        logit = layer.scorer.score_sequence(x, w) - 0.3
    if emitted_by == "next":
        logit = torch.cat([logit[..., 1:], logit[..., :1]], -1)
    z = (logit + (u / (1 - u)).log()) / 0.7
    local = docs.position_BS[0]
    decided = local >= sinks
    if emitted_by == "next":
        decided &= torch.arange(S) + 1 < docs.end_BS[0]
    index = torch.arange(S)
    far = (index[:, None] - index >= w) & decided
    bias = ((1 - z.sigmoid()).log()[:, :, None] * far).repeat_interleave(2, dim=1)
    same = (docs.ids_BS[0][:, None] == docs.ids_BS[0]) & (index <= index[:, None])
    expected = dense_attention(q, k, v, same.expand(2, 2, S, S), bias)
    torch.testing.assert_close(out, expected)
    assert torch.equal(view.closed_BHS.detach(), ((z > 0) & decided).double())
    assert torch.equal(view.expiry, docs.end_BS[:, None].expand(2, 2, S).int())

    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = [*leaves, *layer.parameters()]
    count = (view.closed_BHS * torch.arange(1, S + 1)).sum()
    soft = (z.sigmoid() * decided * torch.arange(1, S + 1)).sum()
    for mine, plain in [((out * cotangent).sum(), (expected * cotangent).sum()), (count, soft)]:
        pair = [
            torch.autograd.grad(x, wanted, retain_graph=True, allow_unused=True, materialize_grads=True)
            for x in (mine, plain)
        ]
        for actual, other in zip(*pair, strict=True):
            torch.testing.assert_close(actual, other)
        gate_gradient = pair[0][0] if gate == "native" else pair[0][-1]
        assert gate_gradient.abs().max() > 0  # attention and the auxiliary loss each reach the gate
    if gate == "mlp":
        assert all(
            (g == 0).all() for g in torch.autograd.grad(count, leaves, allow_unused=True, materialize_grads=True)
        )


def test_no_gradient_reaches_a_frozen_gate_and_none_without_relaxation() -> None:
    layer = layer_of(DMS(window=2, ratio=2, offset=0.0))
    leaves = [x.requires_grad_() for x in qkv(1, 2, 2, 12)]
    out, view = observed(layer, *leaves, Documents.single(1, 12))
    (out.sum() + view.closed_BHS.sum()).backward()
    assert all(p.grad is None for p in layer.parameters())
    assert (view.expiry < NEVER).any()
    layer.requires_grad_(False)
    _, view = observed(layer, *leaves, Documents.single(1, 12), GateSampling(0.1, seeded_uniform(0)))
    assert not view.closed_BHS.requires_grad


def test_relaxed_gates_do_not_touch_the_window_or_the_sinks() -> None:
    q, k, v = qkv(1, 2, 2, 9)
    gates = GateSampling(0.1, seeded_uniform(0))
    keep = torch.ones(9, 9, dtype=torch.bool).tril().expand(1, 2, 9, 9)
    for window, sinks in [(9, 0), (1, 9), (8, 1)]:
        layer = layer_of(DMS(window=window, ratio=2, sinks=sinks, offset=-20.0))
        out, _ = observed(layer, q, k, v, Documents.single(1, 9), gates)
        torch.testing.assert_close(out, dense_attention(q, k, v, keep))
    out, view = observed(layer_of(DMS(window=2, ratio=2, offset=-20.0)), q, k, v, Documents.single(1, 9), gates)
    assert not torch.allclose(out, dense_attention(q, k, v, keep))
    assert view.closed_BHS.sum() == 2 * 8  # all but the last token, which nobody decided about


def test_a_fresh_gate_is_nearly_open_and_learns_to_close() -> None:
    torch.manual_seed(0)
    policy = DMS(window=4, ratio=4)
    layer = policy.layer(LayerShape(layer=0, heads=2, kv_heads=2, head_dim=8))
    assert layer.scorer.hidden == 12
    q, k, v = (x.float() for x in qkv(4, 2, 1, 400, D=8))
    docs = Documents.single(4, 400)
    _, view = observed(layer, q, k, v, docs, GateSampling(0.1, seeded_uniform(0)))
    assert 0 < view.closed_BHS.mean() < 0.02  # sigmoid(-5) = 0.7 %
    assert observed(layer, q, k, v, docs)[1].closed_BHS.sum() == 0
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.05)
    for step in range(80):
        _, view = observed(layer, q, k, v, docs, GateSampling(0.1, seeded_uniform(step)))
        loss = gate_loss(view.closed_BHS, docs, target_at(1.0, policy.ratio))
        if loss == 0:
            break
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert view.closed_BHS.mean() > 0.7


def test_draws_are_reproducible() -> None:
    draw, shape = seeded_uniform(7), (2, 3, 50)
    assert torch.equal(draw(1, shape), seeded_uniform(7)(1, shape))
    assert not torch.equal(draw(1, shape), draw(2, shape))
    assert not torch.equal(draw(1, shape), seeded_uniform(8)(1, shape))
    model = attach(tiny_model(), DMS(window=3, ratio=2, offset=0.0))
    ids, found = torch.randint(3, VOCAB, (1, 20)), []
    for _ in range(2):
        call = SequencePass(Documents.single(1, 20), found.append, gates=GateSampling(0.1, draw))
        model(ids, use_cache=False, kvpop=call)
    assert [torch.equal(a.closed_BHS, b.closed_BHS) for a, b in zip(found[:2], found[2:])] == [True, True]
    assert not torch.equal(found[0].closed_BHS, found[1].closed_BHS)


def test_noise_is_logistic_and_finite_at_the_ends() -> None:
    logit = torch.full((1, 1, 200_000), -1.0)
    z = relaxed(logit, 0, GateSampling(0.5, seeded_uniform(0)))
    assert (z > 0).double().mean().item() == pytest.approx(torch.tensor(-1.0).sigmoid().item(), abs=5e-3)
    ends = relaxed(torch.zeros(1, 1, 2), 0, GateSampling(1.0, lambda layer, shape: torch.tensor([[[0.0, 1.0]]])))
    assert ends.isfinite().all()
    hard = straight_through(torch.tensor([-2.0, 0.0, 3.0], requires_grad=True))
    assert hard.tolist() == [0.0, 0.0, 1.0]


def test_auxiliary_loss() -> None:
    docs = Documents(torch.tensor([[0, 0, 0, 1], [0, 0, -1, -1]]))
    closed = torch.zeros(2, 3, 4, requires_grad=True)
    with torch.no_grad():
        closed[0, :, 0] = 1
    assert [x.item() for x in closed_counts(closed, docs)] == [3, 18]
    loss = gate_loss(closed, docs, 0.5)
    assert loss.item() == pytest.approx(0.5 - 1 / 6)
    loss.backward()
    assert closed.grad.allclose(torch.tensor(-1 / 18))
    assert gate_loss(closed, docs, 0.1).item() == 0
    # Two devices: sums are shared, each keeps the gradient of its own.
    halves = [closed.detach()[i : i + 1].requires_grad_() for i in range(2)]
    own = [closed_counts(x, Documents(docs.ids_BS[i : i + 1])) for i, x in enumerate(halves)]
    closed_sum, tokens = own[0][0] + own[1][0].detach(), own[0][1] + own[1][1]
    shared = shortfall(closed_sum, tokens, 0.5)
    assert shared.item() == pytest.approx(loss.item())
    shared.backward()
    assert halves[0].grad.allclose(torch.tensor(-1 / 18))
    assert shortfall(torch.tensor(0.0), torch.tensor(0), 0.5).item() == 0


def test_target_rises_in_a_straight_line() -> None:
    assert [target_at(p, 4) for p in (0, 0.5, 1, 2)] == pytest.approx([0, 0.375, 0.75, 0.75])
    assert target_at(1, 1) == 0
    with pytest.raises(ValueError, match=r"progress must be at least 0, got -0\.1"):
        target_at(-0.1, 2)
    with pytest.raises(ValueError, match=r"ratio must be at least 1, got 0\.5"):
        target_at(0, 0.5)


# The store: memory.


def store(rows: int, gate, *, H: int = 2, window: int = 4, sinks: int = 0, page: int = 4, D: int = 16) -> PagedSlots:
    like = torch.zeros(rows, H, 0, D)
    return PagedSlots(window, sinks, lambda q, k, v: (q, gate(k)), 0, like, like, page=page)


def always(closed: bool):
    return lambda k: torch.full(k.shape[:3], closed)


def by_sign(k: Tensor) -> Tensor:
    return k[..., 0] > 0


def feed(slots: PagedSlots, tokens: int, seed: int = 0, chunk: int = 1, alternate: bool = False) -> list[int]:
    """Bytes after every chunk."""
    B, H, D = len(slots.seen), slots.table.shape[1], slots.keys.shape[-1]
    generator, sizes = torch.Generator().manual_seed(seed), []
    for start in range(0, tokens, chunk):
        k = torch.randn(B, H, chunk, D, generator=generator)
        if alternate:
            k[..., 0] = (start + torch.arange(chunk)) % 2 - 0.5
        slots.attend(k, k, k, None, 1.0)
        sizes.append(slots.nbytes())
    return sizes


def test_bytes_follow_the_gates() -> None:
    entry = 2 * 16 * 4
    empty, flat = store(1, always(True)).nbytes(), feed(store(1, always(True)), 400)
    assert set(flat) == {empty}
    grown = feed(store(1, always(False)), 4000, chunk=40)
    dense = 2 * 4000 * entry
    assert dense <= grown[-1] < 1.25 * dense
    assert (torch.tensor(grown).diff() >= 0).all()
    half = feed(store(1, by_sign), 4000, chunk=40, alternate=True)
    assert 0.45 < half[-1] / grown[-1] < 0.58


def test_bytes_are_those_of_the_tensors_and_heads_pay_for_themselves() -> None:
    def one_head(k: Tensor) -> Tensor:
        return torch.tensor([True, False, True, True])[None, :, None].expand(k.shape[:3])

    slots = store(1, one_head, H=4)
    sizes = feed(slots, 400, chunk=20)
    assert slots.count.tolist() == [[0, 396, 0, 0]]
    assert len(slots.keys) - 1 - slots.spare == 396 // 4
    assert sizes[-1] < 0.4 * feed(store(1, always(False), H=4), 400, chunk=20)[-1]
    tensors = {id(x): x for x in vars(slots).values() if isinstance(x, Tensor)}
    assert slots.nbytes() == sum(x.untyped_storage().nbytes() for x in tensors.values())


def test_sinks_stay_when_everything_closes() -> None:
    slots = store(2, always(True), sinks=3)
    feed(slots, 50, chunk=7)
    assert slots.held() == [[[0, 1, 2, *range(slots.seen[0] - 4, slots.seen[0])]] * 2] * 2


def test_pages_are_used_again() -> None:
    slots, other = store(3, by_sign), store(1, by_sign)
    feed(slots, 100)
    feed(other, 60, seed=1)
    size = slots.nbytes()
    for _ in range(5):
        slots.clear(slice(1, 2))
        assert slots.held()[1] == [[], []]
        slots.put(1, other)
    assert slots.nbytes() == size
    assert slots.held()[1] == other.held()[0]
    slots.clear(slice(0, 1))
    slots.clear(slice(2, 3))
    assert slots.table.shape[-1] == other.table.shape[-1]  # nothing is gathered for rows that are gone
    slots.clear()
    assert slots.nbytes() == store(3, by_sign).nbytes()
    assert slots.held() == [[[], []]] * 3
    assert int(slots.taken) == 0


def used_pages(slots: PagedSlots) -> None:
    """Every page but 0 is either free or in the table once, and every head has as many as it needs."""
    taken = slots.table[slots.table > 0].tolist()
    assert sorted([*taken, *slots.free[: slots.spare].tolist()]) == list(range(1, len(slots.keys)))
    assert torch.equal((slots.table > 0).sum(-1), -(-slots.count // slots.page))


def same(actual: PagedSlots, expected: PagedSlots, rows: list[int], seed: int = 5) -> None:
    """Rows hold the same and go on the same: what they attend to after more tokens."""
    used_pages(actual)
    assert actual.held() == [expected.held()[row] for row in rows]
    H, D = actual.table.shape[1], actual.keys.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    expected = copy.deepcopy(expected)
    for n in (1, 1, 7, 1):
        k = torch.randn(len(expected.seen), H, n, D, generator=generator)
        torch.testing.assert_close(
            actual.attend(k[rows], k[rows], k[rows], None, 1.0), expected.attend(k, k, k, None, 1.0)[rows]
        )
    used_pages(actual)
    assert actual.held() == [expected.held()[row] for row in rows]


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0, 1], [1, 1, 1], [2, 2, 0, 1, 0], [1], [0, 0, 2]])
def test_rows_move_with_their_pages(rows: list[int]) -> None:
    slots = store(3, by_sign)
    feed(slots, 70)
    for b, n in enumerate((2, 40, 9)):
        one = store(1, by_sign)
        feed(one, n, seed=b)
        slots.put(b, one)
    moved = copy.deepcopy(slots)
    moved.select(torch.tensor(rows))
    same(moved, slots, rows)


def test_replace_rebuilds_what_tensors_gave() -> None:
    slots = store(2, by_sign, sinks=1)
    feed(slots, 33, chunk=3)
    slots.clear(slice(1, 2))
    feed(slots, 3, seed=4)
    other = store(5, by_sign, sinks=1)
    other.replace({name: x.clone() for name, x in slots.tensors().items()})
    same(other, slots, [0, 1])
    fresh = store(2, by_sign)
    fresh.replace({name: x.clone() for name, x in store(2, by_sign).tensors().items()})
    same(fresh, store(2, by_sign), [0, 1])
    moved = copy.deepcopy(slots)
    moved.to("cpu")
    same(moved, slots, [0, 1])
    moved.put(0, moved, 0)
    moved.put(1, moved, 0)
    assert moved.held()[0] == moved.held()[1]
    used_pages(moved)


def test_what_a_row_left_behind_is_not_read() -> None:
    """A row of NaN goes; the row that gets its pages and its place must not see them, not even times 0."""
    slots = store(2, always(False))
    k = torch.randn(2, 2, 30, 16)
    bad = k.clone()
    bad[1] = math.nan
    slots.attend(bad, bad, bad, None, 1.0)
    slots.clear(slice(1, 2))
    valid = torch.tensor([[False], [True]])
    for t in range(9):
        now = k[:, :, t : t + 1]
        assert slots.attend(now, now, now, valid, 1.0).isfinite().all()


# Through the package.


def test_cache_says_that_it_grows_and_refuses_what_it_cannot() -> None:
    model = shaken(attach(tiny_model(), DMS(window=4, ratio=2, offset=0.0)), 1)
    cache = BoundedCache(model)
    assert not cache.is_compileable
    ids = torch.randint(3, VOCAB, (1, 60))
    forward(model, cache, ids, ids[:, :0], torch.ones_like(ids))
    (first, _) = cache.report()
    assert (first["policy"], first["slots"], first["bytes"]) == ("dms", None, cache.stores[0].nbytes())
    assert 4 < cache.rows_held() < 60
    with pytest.raises(ValueError, match="DMS cannot roll back"):
        BoundedCache(model, rollback=4)
    with pytest.raises(ValueError, match="PagedSlots cannot roll back"):
        cache.stores[0].record(4)
    with pytest.raises(ValueError, match="DMSLayer cannot pin"):
        cache.pin([(0, 3)])
    with pytest.raises(ValueError, match="DMSLayer cannot pin"):
        expiries(model, ids, pinned=torch.ones_like(ids, dtype=torch.bool))
    with pytest.raises(ValueError, match="0 tokens can be taken back"):
        cache.crop(-1)


def test_generate_session_and_engine(tmp_path) -> None:
    model = shaken(attach(tiny_model(), DMS(window=4, ratio=2, sinks=1, offset=0.0)), 1)
    ids = torch.randint(3, VOCAB, (2, 20))
    greedy = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    whole = model.generate(ids, **greedy)
    cache = BoundedCache(model)
    with torch.inference_mode():
        part = model.generate(ids, **greedy | {"max_new_tokens": 5}, **{cache_argument(model): cache})
    kvpop.Session(cache).save(tmp_path / "session", model)
    later = kvpop.Session.load(tmp_path / "session", model).cache
    assert later.held_positions() == cache.held_positions()
    for used in (cache, later):
        rest = model.generate(part, **greedy | {"max_new_tokens": 7}, **{cache_argument(model): used})
        assert torch.equal(rest, whole)
    beams = model.generate(ids, max_new_tokens=6, num_beams=3, do_sample=False, eos_token_id=None)
    assert beams.shape == (2, 26)
    twin = cache.like(3)
    twin.put(2, cache, 1)
    assert twin.held_positions()[0][2] == cache.held_positions()[0][1]
    twin.clear(2)
    assert twin.rows_held() == 0


def test_policy_errors() -> None:
    good = dict(window=4, ratio=2)
    for wrong, message in [
        (dict(window=0), "DMS.window must be at least 1, got 0"),
        (dict(window=2.0), "DMS.window must be an integer, got 2.0"),
        (dict(sinks=-1), "DMS.sinks must be at least 0, got -1"),
        (dict(hidden=-1), "DMS.hidden must be at least 0, got -1"),
        (dict(ratio=0.5), "DMS.ratio must be at least 1 and finite, got 0.5"),
        (dict(ratio=math.nan), "DMS.ratio must be at least 1 and finite, got nan"),
        (dict(scale=0), "DMS.scale must be above 0 and finite, got 0"),
        (dict(offset=math.nan), "DMS.offset must be a number"),
        (dict(threshold=math.nan), "DMS.threshold must be a number"),
        (dict(gate="lstm"), "DMS.gate must be one of native, mlp, got 'lstm'"),
        (dict(emitted_by="last"), "DMS.emitted_by must be one of next, self, got 'last'"),
    ]:
        with pytest.raises(ValueError, match=message):
            DMS(**good | wrong)
    policy = kvpop.DMS(**good)
    assert (policy.name, policy.slots) == ("dms", None)
    assert DMS(**good, hidden=7).layer(LayerShape(0, 2, 2, 8)).describe()["hidden"] == 7
    assert DMS(**good, gate="native").layer(LayerShape(0, 2, 2, 8)).describe()["scale"] == 100


def test_sampling_and_store_errors() -> None:
    with pytest.raises(ValueError, match="temperature of relaxed gates must be above 0, got 0"):
        GateSampling(0.0, seeded_uniform(0))
    with pytest.raises(ValueError, match=r"uniform numbers of shape \(1, 2, 5\), got \(1, 2, 4\)"):
        relaxed(torch.zeros(1, 2, 5), 0, GateSampling(1.0, lambda layer, shape: torch.rand(1, 2, 4)))
    x = torch.zeros(1, 1, 0, 4)
    for arguments, message in [
        ((0, 0, 1, 32), "window must be at least 1, got 0"),
        ((1, -1, 1, 32), "sinks must be at least 0, got -1"),
        ((1, 0, 1, 0), "page must be at least 1, got 0"),
        ((1, 0, 2, 32), "lag must be 0 or 1 token, got 2"),
    ]:
        window, sinks, lag, page = arguments
        with pytest.raises(ValueError, match=message):
            PagedSlots(window, sinks, lambda q, k, v: (q, k[..., 0] > 0), lag, x, x, page=page)
