"""Slots of shared memory that go back and forth between a worker and its parent.

Flow:   errors -> packing -> shipping -> [ring] -> worker_main -> processes -> workers -> ...
Owns:   which slot holds which value, the way back, growth.
Leaves: what is in a slot (packing), passing on messages and descriptors (worker_main, processes).
"""

from __future__ import annotations

import collections
import mmap
import os
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from .packing import Packed, new_memory

_WINDOW = 64  # Values between two looks at how many slots were never needed.


class SlotWriter:
    """A worker's side: writes values into slots and takes a slot again once the reader has let it go.

    There are as many slots as values are on their way or in use at the other side. Slots that stayed free
    for a while are given up; so is a slot that is too small, in favour of a larger one.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, mmap.mmap]] = []  # The last used one last.
        self._used: dict[int, mmap.mmap] = {}
        self._dropped: list[int] = []
        self._num_slots = 0
        self._num_writes = 0
        self._never_needed = 0

    def recycle(self, slots: Iterable[int]) -> None:
        """Takes back slots that the reader has let go."""
        self._free.extend((slot, self._used.pop(slot)) for slot in slots)

    def write(self, value: Any) -> tuple[int, int, int | None, list[int]]:
        """Puts a value into a slot.

        Args:
            value: The value.

        Returns:
            `(slot, pickle_bytes, memory, dropped)`: `memory` is the descriptor of the slot's memory if the
            reader does not know it yet, to be passed on and closed; `dropped` are slots that it may forget.

        Raises:
            WorkerError: If there is not enough memory.
            Exception: Whatever pickle raises for a value that it does not take.
        """
        packed = Packed(value)
        self._drop_idle()
        fits = (at for at, (_, mapped) in enumerate(self._free) if len(mapped) >= packed.num_bytes)
        place = max(fits, default=None)
        memory = None
        if place is None:
            slot, mapped, memory = self._new_slot(packed.num_bytes)
        else:
            slot, mapped = self._free.pop(place)
        self._used[slot] = mapped
        self._never_needed = min(self._never_needed, len(self._free))
        packed.write(mapped)
        dropped, self._dropped = self._dropped, []
        return slot, packed.pickle_bytes, memory, dropped

    def _new_slot(self, num_bytes: int) -> tuple[int, mmap.mmap, int]:
        num_bytes = max(num_bytes, mmap.PAGESIZE)
        if self._free:  # Values have grown: a quarter more, so that not each one needs a new slot.
            outgrown, mapped = self._free.pop()
            self._dropped.append(outgrown)
            num_bytes = max(num_bytes, len(mapped) * 5 // 4)
            del mapped  # Its memory may be needed for the new one.
        memory = new_memory(num_bytes)
        self._num_slots += 1
        return self._num_slots, mmap.mmap(memory, num_bytes), memory

    def _drop_idle(self) -> None:
        """Gives up, now and then, as many slots as were free all the time since it last did."""
        self._num_writes += 1
        if self._num_writes % _WINDOW == 0:
            self._dropped += [slot for slot, _ in self._free[: self._never_needed]]
            del self._free[: self._never_needed]
            self._never_needed = len(self._free)


class SlotReader:
    """The parent's side of one worker's slots.

    Attributes:
        released: Slots whose values are gone, to be passed to the writer. Finalisers fill it from any thread.
    """

    def __init__(self) -> None:
        self.released: collections.deque[int] = collections.deque()
        self._slots: dict[int, mmap.mmap] = {}

    def add(self, slot: int, memory: int) -> None:
        """Maps the memory of a new slot and closes its descriptor."""
        self._slots[slot] = mmap.mmap(memory, os.fstat(memory).st_size)
        os.close(memory)

    def forget(self, slots: Iterable[int]) -> None:
        """Lets go of slots that the writer has given up."""
        for slot in slots:
            del self._slots[slot]

    def lease(self, slot: int) -> npt.NDArray[Any]:
        """The bytes of a slot. When this array and every array on it are gone, the slot is released.

        The finaliser is on this array and not on those of the value: a view of one of them has this array
        as its base, since NumPy shortens chains of views, and would not keep that one alive.
        """
        memory = np.frombuffer(self._slots[slot], np.uint8)
        weakref.finalize(memory, self.released.append, slot).atexit = False  # type: ignore[misc]
        return memory
