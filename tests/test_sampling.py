"""What is drawn: the right tokens with the right frequencies, whatever else is in the batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpop.sampling import Sampling, checked, draw, first_beyond, nucleus

LOGITS = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()


def normal(logits, **settings) -> list[float]:
    p = nucleus(logits, [Sampling(1.0, **settings)])[0]
    return (p / p.sum()).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(), [0.1, 0.4, 0.2, 0.3]),
        (dict(top_p=0.6), [0, 4 / 7, 0, 3 / 7]),
        (dict(top_p=0.8), [0, 4 / 9, 2 / 9, 3 / 9]),
        (dict(top_p=1e-6), [0, 1, 0, 0]),
        (dict(top_p=5e-324, top_k=1), [0, 1, 0, 0]),
        (dict(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (dict(top_k=1), [0, 1, 0, 0]),
        (dict(top_k=9), [0.1, 0.4, 0.2, 0.3]),
        (dict(top_k=2, top_p=0.5), [0, 1, 0, 0]),  # of the mass of the two: 4/7
        (dict(top_k=3, top_p=0.7), [0, 4 / 7, 0, 3 / 7]),
    ],
)
def test_the_nucleus_is_the_likeliest_that_complete_the_mass(settings, expected):
    assert normal(LOGITS, **settings) == pytest.approx(expected, abs=1e-7)
    assert LOGITS[0].exp().tolist() == pytest.approx([0.1, 0.4, 0.2, 0.3])  # the input is left alone


def test_of_equally_likely_tokens_the_first_stay():
    assert normal(torch.zeros(1, 4), top_k=1) == [1, 0, 0, 0]
    assert normal(torch.zeros(1, 4), top_p=0.5) == [0.5, 0.5, 0, 0]
    assert draw(torch.zeros(1, 4), [Sampling()], [0.9]).tolist() == [0]


def test_a_mass_of_one_cuts_nothing_off():
    """However the sums are rounded: the least likely of many tokens stays."""
    logits = torch.cat([torch.zeros(1, 50_000), torch.full((1, 1), -30.0)], 1)
    assert (nucleus(logits, [Sampling(1.0, top_k=60_000)]) > 0).all()


def test_temperature_divides_the_logits():
    for temperature in (0.5, 1.0, 3.0):
        p = nucleus(LOGITS, [Sampling(temperature)])
        torch.testing.assert_close(p, (LOGITS.double() / temperature).softmax(-1))


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 100
    rows = [Sampling(temperature, top_p, top_k) for top_p, top_k in ((1.0, 0), (0.9, 0), (1.0, 5))]
    assert torch.equal(draw(logits, rows, [0.0, 0.5, 1 - 2**-53]), logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_frequencies_follow_the_probabilities(dtype):
    n = 4000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens = draw(LOGITS.to(dtype).expand(n, -1), [Sampling(1.0)] * n, u.tolist())
    frequency = tokens.bincount(minlength=4) / n
    torch.testing.assert_close(frequency, LOGITS[0].exp(), atol=4e-3, rtol=0)


def test_the_ends_of_the_unit_interval_never_hit_a_token_of_probability_zero():
    p = torch.tensor([[0.0, 0.3, 0.0, 0.3, 0.3, 0.0]], dtype=torch.float64)
    for u, expected in ((0.0, 1), (1 - 2**-53, 4), (1.0, 4)):  # 1.0: what rounding could make of the last number below
        assert first_beyond(torch.tensor([u], dtype=torch.float64), p).tolist() == [expected]


SETTINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 5.0]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
)


@given(
    st.lists(st.tuples(SETTINGS, st.floats(0, 1, exclude_max=True), st.integers(0, 99)), min_size=1, max_size=5),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_a_row_is_drawn_as_if_it_were_alone_and_has_a_probability(rows, dtype):
    logits = torch.stack(
        [torch.randn(17, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype) for *_, seed in rows]
    )
    logits[:, 5] = -math.inf
    tokens = draw(logits, [s for s, *_ in rows], [u for _, u, _ in rows])
    assert tokens.dtype == torch.int64
    for row, (sampling, u, _) in enumerate(rows):
        alone = logits[row : row + 1]
        assert draw(alone, [sampling], [u]).tolist() == [int(tokens[row])]
        if sampling.temperature:
            assert nucleus(alone, [sampling])[0, tokens[row]] > 0
        else:
            assert int(tokens[row]) == int(alone.argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", ["nan", "all nan", "inf", "all -inf"])
def test_logits_without_a_choice_are_an_error_and_spare_the_other_rows(temperature, bad):
    logits = LOGITS.repeat(2, 1)
    logits[0, 1 if not bad.startswith("all") else slice(None)] = float(bad.removeprefix("all "))
    tokens = draw(logits, [Sampling(temperature, 0.9)] * 2, [0.5, 0.5]).tolist()
    assert tokens == [-1, *draw(LOGITS, [Sampling(temperature, 0.9)], [0.5]).tolist()]
    with pytest.raises(ValueError, match="logits of the next token are NaN"):
        checked(tokens[0])
    assert checked(tokens[1]) == tokens[1]


def test_uniforms_are_a_function_of_the_seed():
    def first(seed: int) -> list[float]:
        return list(itertools.islice(Sampling(seed=seed).uniforms(), 100))

    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert first(0) == first(0) != first(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(0 <= u < 1 for u in first(-1) + first(2**64 - 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(temperature=-1.0), "temperature must be at least 0, got -1.0"),
        (dict(temperature=math.nan), "temperature must be at least 0, got nan"),
        (dict(temperature=math.inf), "temperature must be finite, got inf"),
        (dict(top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
        (dict(top_p=1.1), r"top_p must be in \(0, 1\], got 1.1"),
        (dict(top_p=math.nan), r"top_p must be in \(0, 1\], got nan"),
        (dict(top_k=-1), "top_k must be at least 0, got -1"),
        (dict(seed=2**64), r"seed must be in \[-2\*\*63, 2\*\*64\), got 18446744073709551616"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)
