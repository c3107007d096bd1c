"""The layout of packed and padded batches against loops over tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpop.documents import Documents

H, D = 2, 3


@st.composite
def layouts(draw) -> Tensor:
    """Ids [B, S]: runs of documents and of padding, each document number once in a row, numbers in any order."""
    B, S = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    rows = []
    for _ in range(B):
        names = iter(draw(st.permutations(range(20))))
        row: list[int] = []
        while len(row) < S:
            name = -1 if draw(st.integers(0, 3)) == 0 else next(names)
            row += [name] * draw(st.integers(1, S))
        rows.append(row[:S])
    return torch.tensor(rows)


def runs(ids: Tensor) -> list[tuple[int, int, int]]:
    """(row of the batch, first token, one past the last) of every document, in reading order."""
    found = []
    for b, row in enumerate(ids.tolist()):
        for i, name in enumerate(row):
            if name >= 0:
                if i and row[i - 1] == name:
                    found[-1] = (b, found[-1][1], i + 1)
                else:
                    found.append((b, i, i + 1))
    return found


@given(layouts())
def test_positions_starts_and_ends_against_loops(ids: Tensor) -> None:
    documents, expected = Documents(ids), runs(ids)
    start, end, position, row = (torch.zeros_like(ids) for _ in range(4))
    row -= 1
    for n, (b, first, stop) in enumerate(expected):
        start[b, first:stop], end[b, first:stop], row[b, first:stop] = first, stop, n
        position[b, first:stop] = torch.arange(stop - first)
    assert len(documents) == len(expected)
    assert documents.length_N.tolist() == [stop - first for _, first, stop in expected]
    for actual, wanted in (
        (documents.start_BS, start),
        (documents.end_BS, end),
        (documents.position_BS, position),
        (documents.row_BS, row),
        (documents.valid_BS, ids >= 0),
    ):
        assert torch.equal(actual, wanted)
    whole = [(b, 0, ids.shape[1]) for b in range(ids.shape[0])]
    assert documents.is_trivial == (expected == whole)


@given(layouts())
def test_rows_and_back(ids: Tensor) -> None:
    documents = Documents(ids)
    if not len(documents):
        return
    (B, S), N = ids.shape, len(documents)
    x = torch.randn(B, H, S, D)
    rows = documents.to_rows(x)
    assert rows.shape == (N, H, int(documents.length_N.max()), D)
    for n, (b, first, stop) in enumerate(runs(ids)):
        length = stop - first
        assert torch.equal(rows[n, :, :length], x[b, :, first:stop])
        past = rows[n, :, length:]
        assert torch.equal(past, x[b, :, stop - 1 : stop].expand_as(past))
    valid = documents.valid_BS[:, None, :, None]
    assert torch.equal(documents.from_rows(rows, fill=7.0), torch.where(valid, x, 7.0))
    assert torch.equal(documents.from_rows(rows[..., 0], fill=7.0), torch.where(valid, x, 7.0)[..., 0])
    back = documents.from_rows(rows[..., 0].long(), fill=-3)
    assert back.dtype == torch.long
    assert torch.equal(back, torch.where(valid, x, -3.0).long()[..., 0])


@given(layouts())
def test_gradients_go_to_real_tokens_once_and_never_to_padding(ids: Tensor) -> None:
    documents = Documents(ids)
    if not len(documents):
        return
    x = torch.randn(*ids.shape[:1], H, ids.shape[1], D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    (documents.from_rows(documents.to_rows(x), fill=0.0) * weight).sum().backward()
    assert torch.equal(x.grad, torch.where(documents.valid_BS[:, None, :, None], weight, 0.0))


def test_single_and_padding() -> None:
    assert Documents.single(2, 5).is_trivial
    assert Documents.single(2, 5).position_BS.tolist() == [list(range(5))] * 2
    x = torch.randn(2, H, 5, D)
    assert Documents.single(2, 5).to_rows(x) is x
    valid = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    documents = Documents.from_padding(valid)
    assert not documents.is_trivial
    assert torch.equal(documents.valid_BS, valid.bool())
    assert documents.position_BS.tolist() == [[0, 0, 0, 1], [0, 1, 2, 0]]
    assert documents.end_BS.tolist() == [[0, 0, 4, 4], [3, 3, 3, 0]]


def test_equal_numbers_in_two_rows_are_two_documents() -> None:
    documents = Documents(torch.tensor([[5, 5], [5, 5]]))
    assert len(documents) == 2
    assert documents.is_trivial


def test_documents_numbered_alike_in_different_rows_next_to_each_other() -> None:
    """The last document of one row and the first of the next share a number: still two."""
    documents = Documents(torch.tensor([[1, 2, 2], [2, 2, 3]]))
    assert documents.length_N.tolist() == [1, 2, 2, 1]
    assert documents.position_BS.tolist() == [[0, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize("ids", [[[0, 1, 0]], [[0, -1, 0]], [[3, 3, 3], [4, 5, 4]]])
def test_a_number_in_two_runs_is_an_error(ids: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="two separate runs"):
        Documents(torch.tensor(ids))


@pytest.mark.parametrize("shape", [(3,), (1, 2, 3)])
def test_ids_of_another_shape_are_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape \[batch, tokens\]"):
        Documents(torch.zeros(shape, dtype=torch.long))


def test_nothing_but_padding() -> None:
    documents = Documents(torch.full((2, 4), -1))
    assert len(documents) == 0
    rows = documents.to_rows(torch.randn(2, H, 4, D))
    assert rows.shape == (0, H, 0, D)
    assert torch.equal(documents.from_rows(rows, fill=2.0), torch.full((2, H, 4, D), 2.0))
