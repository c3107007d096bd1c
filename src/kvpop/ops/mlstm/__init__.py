"""The gated linear memory of the mLSTM scorer (Eq. 10-12)."""

from kvpop.ops.mlstm.api import MLSTMState, init_state, mlstm

__all__ = ["MLSTMState", "init_state", "mlstm"]
