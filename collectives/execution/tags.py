"""Numbers that tell plans apart: their tags, and their counters in shared memory."""

from collections import deque
from collections.abc import Callable
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.uint8]
#: Numbers that the ranks look at in one go.
_BATCH = 512


class Tags:
    """A number that no other plan has while this object lives."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class TagPool:
    """Gives out the numbers below ``most``, the same on all ranks.

    Ranks make their plans in the same order, but each drops them when it likes.  So numbers come
    round again only after the ranks have told one another which ones they still use.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._fresh = 0
        self._looked = 0
        self._free: deque[int] = deque()
        self._held: WeakValueDictionary[int, Tags] = WeakValueDictionary()

    def take(self, used_anywhere: Callable[[Mask], Mask]) -> Tags | None:
        """The next free number, ``None`` if no number is free on all ranks.

        Args:
            used_anywhere: from which numbers this rank uses to which ones any rank does.
                Collective; called by all ranks alike, once ``most`` plans were made.
        """
        if self._fresh < self.most:
            self._fresh += 1
            return self._tags(self._fresh - 1)
        for _ in range(-(-self.most // _BATCH)):
            if self._free:
                break
            first = self._looked % self.most
            last = min(first + _BATCH, self.most)
            used = np.array([n in self._held for n in range(first, last)], np.uint8)
            self._free.extend((first + np.flatnonzero(used_anywhere(used) == 0)).tolist())
            self._looked = last
        return self._tags(self._free.popleft()) if self._free else None

    def _tags(self, number: int) -> Tags:
        tags = self._held[number] = Tags(number)
        return tags
