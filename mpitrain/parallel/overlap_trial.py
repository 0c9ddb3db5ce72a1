"""Choice between sums that overlap with computation and sums at its end, by timing steps."""

from statistics import median

#: First steps, which do not count: buffers are touched for the first time, plans are bound.
_FIRST = 2
#: Timed steps of each way; the ways alternate, so that both meet the same load of the machine.
_EACH = 5


class OverlapTrial:
    """Times the first steps both ways, and keeps the faster way; the numbers are the same.

    Attributes:
        overlap: whether sums overlap in the present step.
        decided: whether the choice is made.
        seconds: median of a step with overlap and without, once it is decided.
    """

    def __init__(self) -> None:
        self.overlap = True
        self.decided = False
        self.seconds = (0.0, 0.0)
        self._steps = 0
        self._lasted: dict[bool, list[float]] = {True: [], False: []}

    def tell(self, seconds: float) -> bool:
        """Note the duration of a step; returns whether :meth:`decide` is due."""
        if self.decided:
            return False
        self._steps += 1
        if self._steps > _FIRST:
            self._lasted[self.overlap].append(seconds)
        self.overlap = self._steps % 2 == 0
        if min(map(len, self._lasted.values())) < _EACH:
            return False
        self.seconds = median(self._lasted[True]), median(self._lasted[False])
        return True

    def decide(self, overlapped: float, late: float) -> None:
        """Choose by seconds with overlap and without, on which all ranks have agreed."""
        self.seconds = overlapped, late
        self.overlap, self.decided = overlapped <= late, True
