from kvpop.ops.sparse_attention.api import NEVER, chunk_impl, keep_mask, sparse_attention

__all__ = ["NEVER", "chunk_impl", "keep_mask", "sparse_attention"]
