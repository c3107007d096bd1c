"""Tasks that measure, or train, the retrieval of facts from long text."""

from kvpop.tasks.haystack import RetrievalPrompt
from kvpop.tasks.retrieval import needle_prompt, passkey_prompt, score_retrieval
from kvpop.tasks.training import training_retrieval_document

__all__ = [
    "RetrievalPrompt",
    "needle_prompt",
    "passkey_prompt",
    "score_retrieval",
    "training_retrieval_document",
]
