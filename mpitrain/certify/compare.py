"""The verdict on a run, beside two of one process whose distance is the tolerance."""

from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from mpitrain.arrays import Array
from mpitrain.certify.record import Abstained, Record

#: Verdicts and their exit codes, the worst last.
CODES = {"PASS": 0, "ABSTAIN": 4, "ERROR": 2, "FAIL": 3}
#: A difference may be so many times the distance of the reference's runs, and so many units in the
#: last place of the largest number of a kind.
TIMES = 32


class Judgement(NamedTuple):
    """One of :data:`CODES`, what differs first, and why."""

    verdict: str
    where: str
    text: str


def quantities(record: Record, first: int = 0) -> Iterator[tuple[str, Mapping[str, Array]]]:
    """Quantities in the order of comparison, by name; ``first``: steps before the record."""
    yield "initial parameters", {} if first else record.initial
    for number, step in enumerate(record.steps, first + 1):
        yield f"loss of step {number}", {"the loss": np.array(step.loss)}
        yield f"gradients of step {number}", step.gradients
        yield f"parameters after step {number}", step.parameters


def limits(one: Record, moved: Record) -> list[dict[str, float]]:
    """How far each tensor of each quantity may be from that of ``one``.

    Raises:
        Abstained: both runs of one process do not begin alike, or are not finite.
    """
    if not one.steps:
        raise Abstained("the program took no step")
    if [step.samples for step in one.steps] != [step.samples for step in moved.steps]:
        raise Abstained("two runs of one process read different samples; seed what it draws")
    if _differing(one.initial, moved.initial, dict.fromkeys(one.initial, 0.0)):
        raise Abstained("two runs of one process begin with different parameters; seed them")
    found = []
    for (where, own), (_, other) in zip(quantities(one), quantities(moved), strict=True):
        gaps = {name: float(abs(own[name] - other[name]).max(initial=0)) for name in own}
        largest = max((float(abs(array).max(initial=0)) for array in own.values()), default=0.0)
        if not np.isfinite([largest, *gaps.values()]).all():
            raise Abstained(f"{where}: numbers of one process are not finite")
        found.append({name: TIMES * (gap + one.eps * largest) for name, gap in gaps.items()})
    return found


def judge(
    right: Record, allowed: list[dict[str, float]], found: Record, ranks: int, first: int = 0
) -> Judgement:
    """The verdict on a run of so many ranks, which begins behind step ``first``."""
    right = Record(right.initial, right.steps[first:])
    for number, (step, taken) in enumerate(zip(right.steps, found.steps), first + 1):
        if told := _other_samples(step.samples, taken.samples):
            word, text = told
            return Judgement("FAIL" if found.is_ours else word, f"samples of step {number}", text)
    if len(right.steps) != len(found.steps):
        text = f"there are {len(found.steps)}, and {len(right.steps)} of one process"
        return Judgement("FAIL", "number of steps", text)
    allowed = allowed[:1] + allowed[1 + 3 * first :]
    every = zip(quantities(right, first), quantities(found, first), allowed, strict=True)
    for (where, own), (_, other), most in every:
        is_draw = not found.is_ours and where.startswith("initial")
        if differ := own.keys() ^ other.keys():
            return Judgement("ABSTAIN", where, f"names of parameters differ, as {min(differ)}")
        if names := _differing(own, other, most):
            text = _told(names, own, other, most, ranks)
            if found.draws and not is_draw:
                text = f"{found.draws} draws random numbers, others on each rank"
            return Judgement("ABSTAIN" if found.draws or is_draw else "FAIL", where, text)
    return Judgement("PASS", "", f"{len(found.steps)} steps")


def _differing(
    own: Mapping[str, Array], other: Mapping[str, Array], most: Mapping[str, float]
) -> list[str]:
    """Names of the tensors whose differences are beyond the limits, or not a number."""
    return [
        name
        for name, one in own.items()
        if one.shape != other[name].shape or not abs(one - other[name]).max(initial=0) <= most[name]
    ]


def _other_samples(own: list[object], found: list[object]) -> tuple[str, str] | None:
    """Why a step has other samples than one process, behind the verdict; None: it has the same."""
    times, rest = divmod(len(found), len(own) or 1)  # ranks may share each sample
    right, taken = Counter(own * times), Counter(found)
    if taken == right and not rest:
        return None
    if taken.keys() <= right.keys() and not rest:
        missing = (right - taken).total()
        return "FAIL", f"{missing} of {len(found)} are missing, in whose place others come again"
    known = (taken & Counter(own)).total()
    return "ABSTAIN", f"the data differ: {known} of {len(found)} are among one process's {len(own)}"


def _told(
    names: list[str],
    own: Mapping[str, Array],
    other: Mapping[str, Array],
    most: Mapping[str, float],
    ranks: int,
) -> str:
    """The first difference, as a ratio where it is one number, and the likely cause."""
    name, also = names[0], f" (and {len(names) - 1} more of {len(own)})" * (len(names) > 1)
    one, two = (np.ravel(array[name]).astype(float) for array in (own, other))
    if one.size != two.size:
        return f"{name} has {two.size} numbers, not {one.size}{also}"
    with np.errstate(all="ignore"):
        ratio = float(one @ two / (one @ one))
    gap = abs(one - two).max()
    nearest = Fraction(ratio).limit_denominator(64) if np.isfinite(ratio) else Fraction(1)
    is_ratio = abs(two - float(nearest) * one).max() <= most[name] * max(1.0, abs(float(nearest)))
    if nearest == 1 or not is_ratio:
        return f"{name} differs by up to {gap:.2g}, beyond {most[name]:.1g}{also}"
    causes = {
        Fraction(ranks): "a mean over the ranks is missing",
        Fraction(1, ranks): "a mean over the ranks was taken twice",
        Fraction(0): "it has no part in the sum",
    }
    cause = f": {causes[nearest]}" if nearest in causes else ""
    return f"{name} is {nearest} of one process's{also}{cause}"
