"""What policies keep: recorded from passes over text, saved as plain arrays, and counted by pure functions.

``record.analyse`` is the only part that runs a model. What it returns is saved and loaded by ``Analysis``; ``quantities`` and
``kinds`` count on its arrays, ``figures`` hands the counts to ``plots.analysis`` and the data to ``viewer``.
"""

from kvpop.analysis.data import Analysis, Subject, Text, Trace
from kvpop.analysis.kinds import KINDS, kinds_of

__all__ = ["KINDS", "Analysis", "Subject", "Text", "Trace", "kinds_of"]
