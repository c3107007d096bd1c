"""Tasks that measure, or train, the retrieval of facts from long text."""

from kvpop.tasks.haystack import RetrievalPrompt
from kvpop.tasks.retrieval import mixed_prompt, needle_prompt, passkey_prompt, score_retrieval
from kvpop.tasks.training import training_retrieval_document

__all__ = [
    "RetrievalPrompt",
    "mixed_prompt",
    "needle_prompt",
    "passkey_prompt",
    "score_retrieval",
    "training_retrieval_document",
]
