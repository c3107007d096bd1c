"""The store of one layer: for most policies a fixed number of slots per KV head, filled and overwritten in place.

Pure torch, no transformers: an engine adapter needs nothing else. ``base`` says what every store does, ``ranked`` is the
store of every policy that scores tokens, ``attended`` that of TOVA, ``growing`` that of dense attention, ``paged`` that of DMS.
``journal`` lets a ranked store take its last tokens back.
"""

from kvpop.slots.attended import AttendedSlots
from kvpop.slots.base import CHUNK, FAR, Slots
from kvpop.slots.growing import GrowingSlots
from kvpop.slots.paged import PagedSlots
from kvpop.slots.ranked import RankedSlots

__all__ = ["CHUNK", "FAR", "AttendedSlots", "GrowingSlots", "PagedSlots", "RankedSlots", "Slots"]
