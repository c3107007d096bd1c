"""Graders: mathematics, multiple choice, code; and what contains those that may hang or misbehave."""
