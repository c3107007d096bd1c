"""What of a model's text counts as its answer."""

THOUGHT_ENDS = "</think>"


def final_part(text: str) -> str:
    """The text behind the last ``</think>``; all of it where there is none, since not every model marks its thoughts."""
    return text.rpartition(THOUGHT_ENDS)[2]
