"""From text to batches: read documents, filter, tokenize, pack into sequences of one length, and serve batches by step."""

from kvpop.data.corpus import Corpus, Counts, Reader
from kvpop.data.packing import PackedSequence, chunks, pack
from kvpop.data.prepared import Prepared, is_prepared, prepare
from kvpop.data.recipes import nemotron_math_v2
from kvpop.data.sources import (
    Row,
    Tokenizer,
    documents_from,
    row_text,
    rows_from,
    texts_from,
    tokenize,
    tokenizer_fingerprint,
)
from kvpop.data.stream import Generated, InMemory, Joined, Sequences, SequenceStream

__all__ = [
    "Corpus",
    "Counts",
    "Generated",
    "InMemory",
    "Joined",
    "PackedSequence",
    "Prepared",
    "Reader",
    "Row",
    "SequenceStream",
    "Sequences",
    "Tokenizer",
    "chunks",
    "documents_from",
    "is_prepared",
    "nemotron_math_v2",
    "pack",
    "prepare",
    "row_text",
    "rows_from",
    "texts_from",
    "tokenize",
    "tokenizer_fingerprint",
]
