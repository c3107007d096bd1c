from kvpop.ops.sparse_attention.api import NEVER, keep_mask, sparse_attention

__all__ = ["NEVER", "keep_mask", "sparse_attention"]
