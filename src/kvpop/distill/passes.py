"""One forward pass, as one module call: FSDP gathers the outermost parameters (embedding, head) around exactly that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpop.documents import Documents
from kvpop.policies import SequencePass

# Shapes: B batch, S sequence, E model width.

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """This process' rows of a batch, on the model's device; ``index`` counts batches from the start of the run, ``places``
    the rows of all batches."""

    index: int
    ids: Tensor
    position_ids: Tensor
    documents: Documents
    places: list[int]


class LanguagePass(nn.Module):
    """Calling it runs the decoder under the attached policy, then ``read(hidden_BSE, lm_head)``."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, seq: SequencePass, read: Callable[[Tensor, nn.Module], T]) -> T:
        out = self.model.get_decoder()(
            input_ids=batch.ids, position_ids=batch.position_ids, use_cache=False, kvpop=seq
        )  # fmt: skip
        return read(out.last_hidden_state, self.model.get_output_embeddings())
