"""The distillation KL: chunks change nothing, the top-k form bounds the full one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kvpop.kl import TopLogits, distillation_kl, teacher_logits, top_k_kl, top_logits

V, E = 61, 12


def logits(rows: int = 40, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def full_kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """The definition, in float64."""
    p, q = teacher.double().log_softmax(-1), student.double().log_softmax(-1)
    return F.kl_div(q, p, log_target=True, reduction="none").sum(-1).float()


def kl_of_top(teacher: torch.Tensor, student: torch.Tensor, top: int) -> torch.Tensor:
    return top_k_kl(top_logits(teacher, top), student)


class Case:
    """Hidden states of student and teacher with a head each, and a padding mask that leaves some positions out."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.student = torch.randn(2, 17, E, requires_grad=True)
        self.teacher = torch.randn(2, 17, E)
        self.student_head, self.teacher_head = nn.Linear(E, V, bias=False), nn.Linear(E, V, bias=False)
        with torch.no_grad():
            self.student_head.weight.mul_(3)
            self.teacher_head.weight.mul_(3)
        self.valid = torch.ones(2, 17, dtype=torch.bool)
        self.valid[0, 12:] = False

    def loss(self, top: int = V, chunk: int = 1024) -> torch.Tensor:
        target = self.target(top, chunk)
        return distillation_kl(self.student, self.student_head, target, self.valid, chunk=chunk)

    def target(self, top: int = V, chunk: int = 1024) -> TopLogits:
        return teacher_logits(self.teacher, self.teacher_head, self.valid, top=top, chunk=chunk)

    def gradients(self, loss: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(loss, [self.student, self.student_head.weight]))

    def direct(self) -> torch.Tensor:
        p = self.teacher_head(self.teacher[self.valid]).detach().log_softmax(-1)
        q = self.student_head(self.student[self.valid]).log_softmax(-1)
        return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("chunk", [1, 5, 28, 29, 30, 1024])
def test_any_chunk_gives_the_full_kl_and_its_gradients(chunk: int) -> None:
    case = Case()
    assert int(case.valid.sum()) == 29
    expected = case.direct()
    got = case.loss(chunk=chunk)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(case.gradients(got), case.gradients(expected)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_chunks_do_not_change_the_top_k_form_either() -> None:
    case = Case()
    whole, chunked = case.loss(top=7), case.loss(top=7, chunk=4)
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(case.gradients(chunked), case.gradients(whole)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_padding_does_not_count_and_gets_no_gradient() -> None:
    case = Case()
    before = case.loss()
    (gradient, _) = case.gradients(before)
    assert gradient[0, 12:].abs().max() == 0
    with torch.no_grad():
        case.student[0, 12:] += 100.0
        case.teacher[0, 12:] -= 100.0
    assert case.loss() == before


def test_no_gradient_reaches_the_teacher() -> None:
    case = Case()
    case.teacher.requires_grad_(True)
    case.loss(top=7, chunk=4).backward()
    assert case.teacher.grad is None
    assert case.teacher_head.weight.grad is None


def test_a_batch_of_nothing_but_padding_has_kl_zero_and_a_graph() -> None:
    """A process whose rows are all padding must take part in the backward pass of the others."""
    case = Case()
    case.valid[:] = False
    assert case.target(top=7).index_XK.shape == (0, 7)
    for top in (7, V):
        loss = case.loss(top=top)
        assert loss == 0
        (gradient,) = torch.autograd.grad(loss, [case.student])
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_it_is_a_sum_over_tokens_so_parts_of_a_batch_add_up() -> None:
    case = Case()
    whole, (gradient, _) = case.loss(top=7), case.gradients(case.loss(top=7))
    parts = []
    for row in (0, 1):
        part = Case()
        part.valid[1 - row] = False
        parts.append(part.loss(top=7))
        torch.testing.assert_close(part.gradients(part.loss(top=7))[0][row], gradient[row], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 5, 29, 1024])
def test_the_teacher_is_read_once_into_its_likeliest_tokens(chunk: int) -> None:
    case = Case()
    case.teacher.requires_grad_(True)
    target = case.target(top=7, chunk=chunk)
    log_p = case.teacher_head(case.teacher[case.valid]).detach().log_softmax(-1)
    assert target.index_XK.shape == target.log_p_XK.shape == (29, 7)
    torch.testing.assert_close(target.log_p_XK, log_p.topk(7).values, rtol=1e-5, atol=1e-6)
    assert torch.equal(target.index_XK, log_p.topk(7).indices)
    torch.testing.assert_close(target.rest_X, 1 - log_p.topk(7).values.exp().sum(-1), rtol=1e-4, atol=1e-6)
    assert not target.log_p_XK.requires_grad
    assert case.target(top=10 * V).index_XK.shape == (29, V)


def test_parts_of_the_teacher_are_rows() -> None:
    target = Case().target(top=7)
    part = target.part(slice(3, 5))
    assert torch.equal(part.index_XK, target.index_XK[3:5])
    assert torch.equal(part.log_p_XK, target.log_p_XK[3:5])
    assert torch.equal(part.rest_X, target.rest_X[3:5])


def test_chunks_of_logits_are_made_again_in_the_backward_pass() -> None:
    case, rows = Case(), []
    case.student_head.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    loss = case.loss(top=7, chunk=10)
    assert rows == [10, 10, 9]
    loss.backward()
    assert sorted(rows) == [9, 9, 10, 10, 10, 10]


def test_float64_stays_float64() -> None:
    case = Case()
    case.student, case.teacher = case.student.detach().double().requires_grad_(True), case.teacher.double()
    case.student_head, case.teacher_head = case.student_head.double(), case.teacher_head.double()
    expected, got = case.direct(), case.loss(chunk=5)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=0)
    for mine, theirs in zip(case.gradients(got), case.gradients(expected)):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("top", [V, V + 1, 10 * V])
def test_top_of_the_whole_vocabulary_is_the_full_kl(top: int) -> None:
    teacher, student = logits(seed=0), logits(seed=1)
    torch.testing.assert_close(kl_of_top(teacher, student, top), full_kl(teacher, student), rtol=1e-4, atol=1e-5)


def test_top_k_is_a_lower_bound_that_grows_with_k() -> None:
    teacher, student = logits(seed=0), logits(seed=1)
    full = full_kl(teacher, student)
    previous = torch.zeros(len(full))
    for top in (1, 2, 5, 20, V - 1, V):
        value = kl_of_top(teacher, student, top)
        assert (value <= full + 1e-5).all()
        assert (value >= previous - 1e-5).all()
        previous = value


@pytest.mark.parametrize("top", [1, 8, V])
@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_equal_distributions_have_kl_zero_and_no_gradient(top: int, scale: float) -> None:
    teacher = logits(scale=scale)
    student = (teacher + 5.0).requires_grad_(True)  # a shift of all logits changes nothing
    value = kl_of_top(teacher, student, top)
    torch.testing.assert_close(value, torch.zeros(len(teacher)), rtol=0, atol=2e-5)
    (gradient,) = torch.autograd.grad(value.sum(), student)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=2e-5)


def test_a_difference_on_a_kept_token_is_seen() -> None:
    teacher = logits()
    student = teacher.clone()
    student.scatter_add_(1, teacher.topk(4).indices[:, 3:], torch.full((len(teacher), 1), 1.0))
    full = full_kl(teacher, student)
    assert (full > 0).all()
    assert (kl_of_top(teacher, student, 4)[full > 1e-3] > 1e-4).all()
    swapped = teacher.gather(1, torch.arange(V).flip(0).expand_as(teacher))
    assert (kl_of_top(teacher, swapped, 4) > 0).all()


def test_what_happens_among_dropped_tokens_is_not_seen() -> None:
    teacher = logits()
    order = teacher.argsort(dim=-1, descending=True)
    swapped = order.clone()
    swapped[:, [10, 20]] = order[:, [20, 10]]
    student = torch.empty_like(teacher).scatter_(1, swapped, teacher.gather(1, order))
    assert (full_kl(teacher, student) > 0).any()
    torch.testing.assert_close(kl_of_top(teacher, student, 8), torch.zeros(len(teacher)), rtol=0, atol=1e-5)


def test_gradient_is_that_of_a_finite_difference() -> None:
    teacher, student = logits(3, seed=0, scale=1.0), logits(3, seed=1, scale=1.0).requires_grad_(True)
    direction = logits(3, seed=2, scale=1.0)
    (gradient,) = torch.autograd.grad(kl_of_top(teacher, student, 6).sum(), student)
    h = 1e-2
    with torch.no_grad():
        up, down = (kl_of_top(teacher, student + sign * h * direction, 6).sum() for sign in (1, -1))
    torch.testing.assert_close((gradient * direction).sum(), (up - down) / (2 * h), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("top", [1, 8, V])
def test_certain_and_opposite_distributions_stay_finite(top: int) -> None:
    teacher = torch.zeros(4, V)
    teacher[:, 0] = 200.0
    student = torch.zeros(4, V)
    student[:, 1] = 200.0
    student.requires_grad_(True)
    value = kl_of_top(teacher, student, top)
    torch.testing.assert_close(value, torch.full((4,), 200.0))
    (gradient,) = torch.autograd.grad(value.sum(), student)
    assert gradient.isfinite().all()
    assert (gradient[:, 0] < -0.9).all()


@pytest.mark.parametrize("top", [8, V])
def test_bf16_logits_are_compared_in_float32(top: int) -> None:
    teacher, student = logits(seed=0).bfloat16(), logits(seed=1).bfloat16()
    value = kl_of_top(teacher, student, top)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, kl_of_top(teacher.float(), student.float(), top), rtol=0, atol=0)
    case = Case()
    case.student = case.student.detach().bfloat16().requires_grad_(True)
    case.teacher = case.teacher.bfloat16()
    case.student_head, case.teacher_head = case.student_head.bfloat16(), case.teacher_head.bfloat16()
    loss = case.loss(top=top, chunk=7)
    assert loss.dtype == torch.float32
    assert all(g.dtype == torch.bfloat16 and g.isfinite().all() for g in case.gradients(loss))
    torch.testing.assert_close(loss, Case().loss(top=top), rtol=0.05, atol=0.02)
