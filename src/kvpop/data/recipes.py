"""Corpora by the papers that trained on them."""

from __future__ import annotations

from typing import Any

from kvpop.data.corpus import Corpus, Packing

NEMOTRON_MATH_V2 = "nvidia/Nemotron-Math-v2"
HIGH_EFFORT = ("high_part00", "high_part01", "high_part02")


def nemotron_math_v2(length: int = 16_384, packing: Packing = "isolated", **settings: Any) -> Corpus:
    """Traces of reasoning on competition and forum problems (gpt-oss-120b, answers checked), as the KVpop paper took them:
    high reasoning effort, documents of at most ``length`` tokens under the model's own tokenizer, packed.

    ``packing="shared"`` is the paper's setting; ``settings`` are more fields of ``Corpus``. Needs the hub, and the extra
    ``kvpop[data]``. The three splits of high effort are read as one stream (113 GB as JSONL; a limit on tokens stops early).
    Effort is the split's name: no field of a row says it. By the data set's card and by programs that read it, rows have
    "messages" (assistant turns with "reasoning_content", perhaps "tool_calls"), "tools" (empty without Python), "problem",
    "expected_answer", "data_source", "uuid", "changed_answer_to_majority", and "metadata" with pass rates of the problem by
    setting ("metadata.reason_high_no_tool.accuracy"). ``where=(("tools", "[]"),)`` should leave out the traces with Python (a
    parquet copy may have null instead).

    Not checked here, for want of a network: those names on the rows themselves, and that the stream's order is the same every
    day. Not said by the paper: whether traces with Python were used, and how reasoning was written for models whose chat
    template has no place for it (``reasoning="inline"`` writes <think> ... </think>; a template that drops it is an error).
    """
    source = f"{NEMOTRON_MATH_V2}:{'+'.join(HIGH_EFFORT)}:messages"
    return Corpus(**{"source": source, "max_tokens": length, "overlong": "drop", "packing": packing, **settings})
