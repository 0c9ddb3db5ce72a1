"""``auto`` beside the MPI library's own on the same memory, in several runs of a benchmark."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.words import bytes_in_words
from collectives.analysis.records import Record, read
from collectives.errors import CollectiveError

#: Median ratio below which a case is named.
FAIR = 0.97


class Case(NamedTuple):
    """A measurement that each run has."""

    library: str
    collective: str
    memory: str
    bytes: int
    in_place: bool

    def __str__(self) -> str:
        place = ", in place" if self.in_place else ""
        size = bytes_in_words(self.bytes)
        return f"{self.collective} of {size}, {self.memory}{place}, {self.library}"


class Ratios(NamedTuple):
    """Native's time over that of ``auto``, one for each run; ``took`` is what ``auto`` ran."""

    of_runs: list[float]
    took: set[str]

    @property
    def are_ours(self) -> bool:
        """Whether ``auto`` took one of ours."""
        return "native" not in self.took


def report(paths: Sequence[Path]) -> str:
    """A Markdown table of one line for each collective, and the cases whose median over the runs is
    below :data:`FAIR`.

    A case is one collective of one size on one kind of memory by one MPI; of several files with
    the same case, each is a run of it.  Where ``auto`` took the library's own, the two times are of
    the same call: their ratio is the noise of the benchmark.

    Raises:
        CollectiveError: for a file that is no benchmark's, or if no row of ``auto`` has one of
            native beside it.
    """
    cases = _cases(paths)
    if not cases:
        raise CollectiveError("no file has rows of auto and native: bench --algorithm auto")
    lines = [
        "| native's time / auto's | runs | auto takes ours: cases | least run | median | most "
        "| auto takes native: cases | least run | median |",
        "| :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for collective in dict.fromkeys(case.collective for case in cases):
        mine = {case: found for case, found in cases.items() if case.collective == collective}
        runs = sorted({len(found.of_runs) for found in mine.values()})
        ours, native = (
            [found for found in mine.values() if found.are_ours == wanted]
            for wanted in (True, False)
        )
        cells = [collective, " or ".join(map(str, runs)), *_told(ours, most=True), *_told(native)]
        lines.append(f"| {' | '.join(cells)} |")
    slow = {case: found for case, found in cases.items() if median(found.of_runs) < FAIR}
    lines.append(f"\nbelow {FAIR} in the median of the runs: {len(slow)} of {len(cases)} cases")
    for case, found in sorted(slow.items(), key=lambda item: median(item[1].of_runs)):
        runs_of_it = " ".join(f"{ratio:.2f}" for ratio in found.of_runs)
        lines.append(f"- {case}: {runs_of_it}; auto took {', '.join(sorted(found.took))}")
    return "\n".join(lines)


def _cases(paths: Iterable[Path]) -> dict[Case, Ratios]:
    cases: dict[Case, Ratios] = defaultdict(lambda: Ratios([], set()))
    for path in paths:
        told = read(path)

        def case(row: Record, library: str = str(told.environment)) -> Case:
            return Case(library, row.collective, row.memory, row.bytes, row.in_place)

        native = {case(row): row.p50_us for row in told.results if row.algorithm == "native"}
        for row in told.results:
            if row.algorithm == "auto" and (own := case(row)) in native:
                cases[own].of_runs.append(native[own] / row.p50_us)
                cases[own].took.add(row.ran)
    return dict(cases)


def _told(found: list[Ratios], most: bool = False) -> list[str]:
    """How many cases, and their ratios: the least of all runs, the median and the largest of the
    cases' medians."""
    if not found:
        return ["0", *["-"] * (3 if most else 2)]
    medians = [median(one.of_runs) for one in found]
    least = min(ratio for one in found for ratio in one.of_runs)
    numbers = [least, median(medians), *([max(medians)] if most else [])]
    return [str(len(found)), *(f"{number:.2f}" for number in numbers)]
