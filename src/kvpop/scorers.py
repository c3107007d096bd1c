"""Scorers: how much a cached token will matter, from its key and value (memory: Eq. 10-12).

A scorer reads x = [k; v] as cached (post-RoPE key, raw value), separately for every KV head, and returns one number a
token. Inputs are detached: the loss on scores never reaches the backbone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpop.ops import HAS_TRITON
from kvpop.ops.cache_step.fused import MemoryWeights, MLPWeights, Weights
from kvpop.ops.mlstm import MLSTMState, init_state, mlstm

# Shapes: N rows (one document or one running sequence each), H KV heads, L tokens, D head dim, E = 2 D channels of x =
# [k; v], A = D / 2 value channels of the memory, M hidden units, F any number of features.

State = tuple[Tensor, ...]

GATE_CAP = 15.0
"""Gate logits are held within +-15: an input gate of at most 3e6, a forget gate of at most 1 - 3e-7."""


class Scorer(nn.Module, ABC):
    """One score per KV head and token.

    Inputs are standardised with ``shift_HE`` and ``scale_HE`` first. They are the identity until ``calibrate`` sets
    them from data: a data-dependent initialisation, equivalent to a reparameterised first layer, saved with the
    weights.

    Everything is computed in float32, or in float64 after ``.double()``, whatever the dtype of the inputs.

    Attributes:
        delayed: True if token t is scored when token t + w arrives, with a memory that has seen tokens up to t + w.
        heads: KV heads; they share no weights.
        head_dim: D, channels of a key and of a value.
    """

    shift_HE: Tensor
    scale_HE: Tensor
    calibrated: Tensor

    def __init__(self, heads: int, head_dim: int, *, delayed: bool) -> None:
        super().__init__()
        for name, value in (("heads", heads), ("head_dim", head_dim)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.heads, self.head_dim, self.delayed = heads, head_dim, delayed
        self.register_buffer("shift_HE", torch.zeros(heads, 2 * head_dim))
        self.register_buffer("scale_HE", torch.ones(heads, 2 * head_dim))
        self.register_buffer("calibrated", torch.tensor(False))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of states and scores: float64 for a float64 module, float32 for any other."""
        return torch.float64 if self.scale_HE.dtype == torch.float64 else torch.float32

    def init_state(self, rows: int, device: torch.device | str = "cpu") -> State:
        """The state before the first token: tensors with ``rows`` as their first dimension, none if stateless."""
        return ()

    def state_bytes(self) -> int:
        """Bytes of state per row and KV head, 0 if stateless."""
        return 0

    def advance(
        self, state: State, x_new_NHLE: Tensor, x_due_NHLE: Tensor, valid_NL: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Let L tokens enter one after the other; score ``x_due[j]`` once ``x_new[j]`` has entered.

        Stateless scorers look at ``x_due`` only. ``valid_NL`` is False on padding after the end of a row: there the
        state stays as it is and the score is arbitrary. Advancing by L tokens equals advancing by any split of them,
        up to rounding.

        Returns score_NHL and the new state; the old one is not modified. Raises ValueError for shapes that do not fit.
        """
        self._check(x_new_NHLE, valid_NL)
        with torch.autocast(x_new_NHLE.device.type, enabled=False):
            new_NHLE = self._normalise(x_new_NHLE.detach())
            if x_due_NHLE is x_new_NHLE:
                return self._advance(state, new_NHLE, new_NHLE, valid_NL)
            if x_due_NHLE.shape != x_new_NHLE.shape:
                raise ValueError(
                    f"x_due must have the shape of x_new {tuple(x_new_NHLE.shape)}, got {tuple(x_due_NHLE.shape)}"
                )
            return self._advance(state, new_NHLE, self._normalise(x_due_NHLE.detach()), valid_NL)

    def score_sequence(self, x_NHLE: Tensor, window: int, valid_NL: Tensor | None = None) -> Tensor:
        """score_NHL of whole documents, one a row, from a fresh state.

        A delayed scorer reads token t at t + ``window``; tokens that never come due (the last ``window`` ones of a
        row) get 0, and so does padding. Raises ValueError for window < 0 and for shapes that do not fit.
        """
        if window < 0:
            raise ValueError(f"window must be at least 0 tokens, got {window}")
        self._check(x_NHLE, valid_NL)
        delay = min(window, x_NHLE.shape[2]) if self.delayed else 0
        with torch.autocast(x_NHLE.device.type, enabled=False):
            score_NHL = self._sequence(self._normalise(x_NHLE.detach()), delay, valid_NL)
        if valid_NL is not None:
            score_NHL = torch.where(valid_NL.bool()[:, None], score_NHL, 0.0)
        return F.pad(score_NHL[:, :, delay:], (0, delay))

    @torch.no_grad()
    def moments(self, x_NHLE: Tensor, valid_NL: Tensor | None = None) -> Tensor:
        """Per head and channel the number of valid tokens, their sum and their sum of squares: [3, H, E], float64.

        Moments of several batches add up. Raises ValueError for shapes that do not fit.
        """
        self._check(x_NHLE, valid_NL)
        x_HTE = x_NHLE.detach().transpose(0, 1).flatten(1, 2).double()
        if valid_NL is not None:
            x_HTE = x_HTE[:, valid_NL.bool().flatten()]
        return torch.stack([torch.full_like(self.shift_HE.double(), x_HTE.shape[1]), x_HTE.sum(1), (x_HTE**2).sum(1)])

    @torch.no_grad()
    def standardise(self, moments_3HE: Tensor) -> None:
        """Set the standardisation to the mean and 1 / std (std at least 1e-4) that ``moments`` give.

        Raises ValueError if they count no token.
        """
        count_HE, sum_HE, square_HE = moments_3HE
        if not bool((count_HE > 0).all()):
            raise ValueError("standardise needs at least 1 valid token, got 0")
        mean_HE = sum_HE / count_HE
        self.shift_HE.copy_(mean_HE)
        self.scale_HE.copy_(1.0 / (square_HE / count_HE - mean_HE**2).clamp(min=0).sqrt().clamp(min=1e-4))
        self.calibrated.fill_(True)

    def calibrate(self, x_NHLE: Tensor, valid_NL: Tensor | None = None) -> None:
        """``standardise`` to these tokens."""
        self.standardise(self.moments(x_NHLE, valid_NL))

    def step_weights(self) -> Weights | None:
        """The weights with which the fused decoding step runs this scorer; None if it cannot, and ``advance`` has to."""
        return None

    def _own_weights(self, mlp: MLPWeights | None = None, memory: MemoryWeights | None = None) -> Weights | None:
        if self.dtype != torch.float32:
            return None
        return Weights(self.shift_HE, self.scale_HE, mlp, memory)

    @abstractmethod
    def _advance(
        self, state: State, x_new_NHLE: Tensor, x_due_NHLE: Tensor, valid_NL: Tensor | None
    ) -> tuple[Tensor, State]:
        """``advance`` on standardised inputs in ``self.dtype``."""

    def _sequence(self, x_NHLE: Tensor, delay: int, valid_NL: Tensor | None) -> Tensor:
        """Scores from a fresh state, each ``delay`` tokens behind the token that is scored, of standardised inputs."""
        state = self.init_state(x_NHLE.shape[0], x_NHLE.device)
        return self._advance(state, x_NHLE, _behind(x_NHLE, delay), valid_NL)[0]

    def _normalise(self, x_NHLE: Tensor) -> Tensor:
        shift_HE, scale_HE = self.shift_HE.to(self.dtype), self.scale_HE.to(self.dtype)
        return (x_NHLE.to(self.dtype) - shift_HE[:, None]) * scale_HE[:, None]

    def _check(self, x_NHLE: Tensor, valid_NL: Tensor | None) -> None:
        if x_NHLE.ndim != 4 or x_NHLE.shape[1] != self.heads or x_NHLE.shape[3] != 2 * self.head_dim:
            raise ValueError(
                f"x must have shape [rows, {self.heads} heads, tokens, {2 * self.head_dim} channels], "
                f"got {tuple(x_NHLE.shape)}"
            )
        if valid_NL is not None and valid_NL.shape != (x_NHLE.shape[0], x_NHLE.shape[2]):
            raise ValueError(f"valid must have shape {(x_NHLE.shape[0], x_NHLE.shape[2])}, got {tuple(valid_NL.shape)}")


class MLPScorer(Scorer):
    """score = w_2 . SiLU(W_1 x + b_1) + b_2 per KV head. Stateless; not delayed.

    ``hidden`` is m, by default round(1.5 D), which gives the parameter count of ``MLSTMScorer``.
    """

    def __init__(self, heads: int, head_dim: int, hidden: int | None = None) -> None:
        super().__init__(heads, head_dim, delayed=False)
        self.hidden = round(1.5 * head_dim) if hidden is None else hidden
        if self.hidden < 1:
            raise ValueError(f"hidden must be at least 1, got {self.hidden}")
        self.w1_HEM = _normal(heads, 2 * head_dim, self.hidden, std=(2 * head_dim) ** -0.5)
        self.b1_HM = nn.Parameter(torch.zeros(heads, self.hidden))
        self.w2_HM = _normal(heads, self.hidden, std=0.02 * self.hidden**-0.5)
        self.b2_H = nn.Parameter(torch.zeros(heads))

    def step_weights(self) -> Weights | None:
        return self._own_weights(mlp=self._parts())

    def _parts(self) -> MLPWeights:
        return MLPWeights(self.w1_HEM, self.b1_HM, self.w2_HM, self.b2_H)

    def _advance(
        self, state: State, x_new_NHLE: Tensor, x_due_NHLE: Tensor, valid_NL: Tensor | None
    ) -> tuple[Tensor, State]:
        hidden_NHLM = F.silu(_project(x_due_NHLE, self.w1_HEM, self.b1_HM))
        return _dot(hidden_NHLM, self.w2_HM, self.b2_H), state

    def _sequence(self, x_NHLE: Tensor, delay: int, valid_NL: Tensor | None) -> Tensor:
        return _behind(self._advance((), x_NHLE, x_NHLE, valid_NL)[0], delay)


class MLSTMScorer(Scorer):
    """A gated linear memory of the sequence, read out by the token that is scored (Eq. 10-12).

    Features phi(x) = [softmax(x); softmax(-x)] of W_q x and W_k x, values W_v x, gates i = exp(w_i . x) and
    f = sigmoid(w_f . x + b_f) with logits capped at +-15; score = a . SiLU(h) + b with the readout h.

    ``delayed=False`` reads a token as it enters: the paper's ablation. ``horizon`` (tokens) sets the forget biases,
    spread over the heads so that memories start with lengths of about 0.6 to 4.5 horizons; without a bias a token
    would be forgotten in a few steps. Raises ValueError for an odd ``head_dim`` and horizon <= 0.
    """

    def __init__(self, heads: int, head_dim: int, delayed: bool = True, horizon: float = 64) -> None:
        super().__init__(heads, head_dim, delayed=delayed)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, got {head_dim}")
        if not horizon > 0:
            raise ValueError(f"horizon must be above 0 tokens, got {horizon}")
        channels, half = 2 * head_dim, head_dim // 2
        self.w_q_HEA, self.w_k_HEA, self.w_v_HEA = (
            _normal(heads, channels, half, std=channels**-0.5) for _ in range(3)
        )
        self.w_i_HE, self.w_f_HE = (_normal(heads, channels, std=0.1 * channels**-0.5) for _ in range(2))
        self.b_f_H = nn.Parameter(math.log(horizon) + torch.linspace(-0.5, 1.5, heads))
        self.a_HA = _normal(heads, half, std=0.02 * half**-0.5)
        self.b_H = nn.Parameter(torch.zeros(heads))

    def init_state(self, rows: int, device: torch.device | str = "cpu") -> State:
        return tuple(init_state(rows, self.heads, self.head_dim, self.head_dim // 2, self.dtype, device))

    def state_bytes(self) -> int:
        return (self.head_dim * (self.head_dim // 2 + 1) + 1) * self.dtype.itemsize

    def step_weights(self) -> Weights | None:
        return self._own_weights(memory=self._parts())

    def _parts(self) -> MemoryWeights:
        return MemoryWeights(
            self.w_q_HEA,
            self.w_k_HEA,
            self.w_v_HEA,
            self.w_i_HE,
            self.w_f_HE,
            self.b_f_H,
            self.a_HA,
            self.b_H,
            GATE_CAP,
        )

    def _advance(
        self, state: State, x_new_NHLE: Tensor, x_due_NHLE: Tensor, valid_NL: Tensor | None
    ) -> tuple[Tensor, State]:
        return self._remember(state, x_new_NHLE, self._query(x_due_NHLE), valid_NL)

    def _sequence(self, x_NHLE: Tensor, delay: int, valid_NL: Tensor | None) -> Tensor:
        state = self.init_state(x_NHLE.shape[0], x_NHLE.device)
        return self._remember(state, x_NHLE, _behind(self._query(x_NHLE), delay), valid_NL)[0]

    def _query(self, x_NHLE: Tensor) -> Tensor:
        return _hedgehog(_project(x_NHLE, self.w_q_HEA))

    def _remember(
        self, state: State, x_new_NHLE: Tensor, q_NHLD: Tensor, valid_NL: Tensor | None
    ) -> tuple[Tensor, State]:
        half, gates_HE2 = self.head_dim // 2, torch.stack([self.w_i_HE, self.w_f_HE], dim=-1)
        both_HEF = torch.cat([self.w_k_HEA, self.w_v_HEA], dim=-1)
        if (
            x_new_NHLE.shape[2] == 1
        ):  # one product for all that is read off the new tokens: in decoding every launch counts
            k_NHLA, v_NHLA, gates_NHL2 = _project(x_new_NHLE, torch.cat([both_HEF, gates_HE2], dim=-1)).split(
                [half, half, 2], dim=-1
            )
        else:
            k_NHLA, v_NHLA = _project(x_new_NHLE, both_HEF).split(half, dim=-1)
            gates_NHL2 = _project(x_new_NHLE, gates_HE2)
        k_NHLD = _hedgehog(k_NHLA)
        log_i_NHL = gates_NHL2[..., 0].clamp(-GATE_CAP, GATE_CAP)
        f_logit_NHL = gates_NHL2[..., 1] + self.b_f_H.to(self.dtype)[:, None]
        log_f_NHL = F.logsigmoid(f_logit_NHL.clamp(-GATE_CAP, GATE_CAP))
        h_NHLA, memory = mlstm(
            q_NHLD,
            k_NHLD,
            v_NHLA,
            log_i_NHL,
            log_f_NHL,
            MLSTMState(*state),
            valid_NL,
            impl="recurrent" if x_new_NHLE.shape[2] == 1 else _sequence_impl(v_NHLA),
        )
        return _dot(F.silu(h_NHLA), self.a_HA, self.b_H), tuple(memory)


class SumScorer(Scorer):
    """The MLP on the token that is due plus the delayed memory's readout of it. Delayed.

    Only this module's own standardisation is used; that of the two parts stays the identity.
    """

    def __init__(self, heads: int, head_dim: int, hidden: int | None = None, horizon: float = 64) -> None:
        super().__init__(heads, head_dim, delayed=True)
        self.mlp = MLPScorer(heads, head_dim, hidden)
        self.mlstm = MLSTMScorer(heads, head_dim, delayed=True, horizon=horizon)

    def init_state(self, rows: int, device: torch.device | str = "cpu") -> State:
        return self.mlstm.init_state(rows, device)

    def state_bytes(self) -> int:
        return self.mlstm.state_bytes()

    def step_weights(self) -> Weights | None:
        return self._own_weights(self.mlp._parts(), self.mlstm._parts())

    def _advance(
        self, state: State, x_new_NHLE: Tensor, x_due_NHLE: Tensor, valid_NL: Tensor | None
    ) -> tuple[Tensor, State]:
        own_NHL, _ = self.mlp._advance((), x_new_NHLE, x_due_NHLE, valid_NL)
        memory_NHL, state = self.mlstm._advance(state, x_new_NHLE, x_due_NHLE, valid_NL)
        return own_NHL + memory_NHL, state

    def _sequence(self, x_NHLE: Tensor, delay: int, valid_NL: Tensor | None) -> Tensor:
        return self.mlp._sequence(x_NHLE, delay, valid_NL) + self.mlstm._sequence(x_NHLE, delay, valid_NL)


class ConstantScorer(Scorer):
    """The same score for every token, also infinite or NaN. Stateless; not delayed; no parameters."""

    def __init__(self, heads: int, head_dim: int, value: float = 0.0) -> None:
        super().__init__(heads, head_dim, delayed=False)
        self.value = value

    def step_weights(self) -> Weights | None:
        return None if self.value else self._own_weights()

    def _advance(
        self, state: State, x_new_NHLE: Tensor, x_due_NHLE: Tensor, valid_NL: Tensor | None
    ) -> tuple[Tensor, State]:
        return torch.full(x_due_NHLE.shape[:3], self.value, dtype=self.dtype, device=x_due_NHLE.device), state


def build_scorer(kind: str, heads: int, head_dim: int, **options: Any) -> Scorer:
    """The scorer called "mlp", "mlstm", "mlstm-immediate" or "mlp+mlstm"; ``options`` go to its constructor.

    Raises ValueError, listing the known kinds, for any other name.
    """
    if kind not in _KINDS:
        raise ValueError(f"scorer kind must be one of {', '.join(_KINDS)}, got {kind!r}")
    return _KINDS[kind](heads, head_dim, **options)


_KINDS: dict[str, Callable[..., Scorer]] = {
    "mlp": MLPScorer,
    "mlstm": MLSTMScorer,
    "mlstm-immediate": partial(MLSTMScorer, delayed=False),
    "mlp+mlstm": SumScorer,
}


def _normal(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std)


def _sequence_impl(x: Tensor) -> Literal["chunkwise", "triton"]:
    """Kernels on a GPU, unless a gradient is needed or the computation is wider than they are."""
    fits = x.is_cuda and x.dtype == torch.float32 and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return "triton" if HAS_TRITON and fits else "chunkwise"


def _behind(x_NHLX: Tensor, delay: int) -> Tensor:
    """``delay`` tokens later; before anything is due, the first."""
    if not delay:
        return x_NHLX
    nothing_due = x_NHLX[:, :, :1].expand(-1, -1, delay, *x_NHLX.shape[3:])
    return torch.cat([nothing_due, x_NHLX[:, :, : x_NHLX.shape[2] - delay]], dim=2)


def _hedgehog(x_NHLA: Tensor) -> Tensor:
    """phi(x) = [softmax(x); softmax(-x)]: positive features, twice as many as channels."""
    return torch.cat([x_NHLA.softmax(-1), (-x_NHLA).softmax(-1)], dim=-1)


def _dot(x_NHLF: Tensor, w_HF: Tensor, bias_H: Tensor) -> Tensor:
    """Every head's own inner product: a sum, which a compiler fuses with what made x, instead of a product of matrices."""
    return (x_NHLF * w_HF.to(x_NHLF.dtype)[:, None]).sum(-1) + bias_H.to(x_NHLF.dtype)[:, None]


def _project(x_NHLE: Tensor, w_HEF: Tensor, bias_HF: Tensor | None = None) -> Tensor:
    """Every head's own linear map, as one batched product over heads, in the dtype of x."""
    N, H, L, E = x_NHLE.shape
    x_HTE = x_NHLE.transpose(0, 1).reshape(H, N * L, E)
    w_HEF = w_HEF.to(x_NHLE.dtype)
    if bias_HF is None:
        y_HTF = torch.bmm(x_HTE, w_HEF)
    else:
        y_HTF = torch.baddbmm(bias_HF.to(x_NHLE.dtype)[:, None], x_HTE, w_HEF)
    return y_HTF.reshape(H, N, L, w_HEF.shape[-1]).transpose(0, 1)
