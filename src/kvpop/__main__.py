"""``python -m kvpop``: the command line, as torchrun starts it."""

from kvpop.cli import app

app()
