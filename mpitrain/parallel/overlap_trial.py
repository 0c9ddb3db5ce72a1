"""Whether sums that overlap with computation are faster here than sums at its end: by trying."""

from statistics import median

#: Steps that do not count: buffers are touched for the first time, plans are bound.
_FIRST = 2
#: Steps of each way that do; the ways take turns, so that neither has the quiet minutes alone.
_EACH = 5


class Trial:
    """Times the first steps both ways, and keeps the better: the same numbers either way.

    Attributes:
        overlap: the way of the present step.
        decided: whether it is that of all steps from now on.
        seconds: median of a step with overlap and without it, once it is decided.
    """

    def __init__(self) -> None:
        self.overlap = True
        self.decided = False
        self.seconds = (0.0, 0.0)
        self._steps = 0
        self._lasted: dict[bool, list[float]] = {True: [], False: []}

    def tell(self, seconds: float) -> bool:
        """A step lasted so long; whether enough of them are known now to :meth:`decide`."""
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
        """By seconds with overlap and without it that all ranks have agreed on."""
        self.seconds = overlapped, late
        self.overlap, self.decided = overlapped <= late, True
