"""The verdict on a run, beside two of one process whose distance is the tolerance."""

from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from mpitrain.arrays import Array
from mpitrain.certify.record import Abstained, Record
from mpitrain.metrics.words import counted

#: Verdicts and their exit codes, the worst last.
CODES = {"PASS": 0, "ABSTAIN": 4, "ERROR": 2, "FAIL": 3}
#: The verdict on a planted mistake that is none.
LEFT_OUT = "LEFT OUT"
#: A difference may be so many times the distance of the reference's runs, and so many units in the
#: last place of the tensor's largest number; also a few of what rounding has met on the way.
TIMES, FEW = 32, 8
#: The part of a tensor's largest number that a limit may be; a larger one proves nothing.
PART = 1 / 8


class Judgement(NamedTuple):
    """One of :data:`CODES`, what differs first, and why."""

    verdict: str
    where: str
    text: str


class Quantity(NamedTuple):
    """Tensors by name, and the largest numbers by whose size each was rounded besides its own."""

    where: str
    own: Mapping[str, Array]
    rounded: Mapping[str, float]


def quantities(record: Record, begun: Mapping[str, Array], first: int = 0) -> Iterator[Quantity]:
    """Quantities in the order of comparison; those of parameters are changes since ``begun``.

    ``first``: steps before the record.
    """
    yield Quantity("initial parameters", {} if first else record.initial, {})
    for number, step in enumerate(record.steps, first + 1):
        yield Quantity(f"loss of step {number}", {"the loss": np.array(step.loss)}, {})
        whole = _largest_of(step.gradients)
        rounded = dict.fromkeys(step.gradients, whole)
        yield Quantity(f"gradients of step {number}", step.gradients, rounded)
        changes = {name: _since(begun.get(name), one) for name, one in step.parameters.items()}
        whole = _largest_of(changes)
        rounded = {name: whole + _largest(one) for name, one in step.parameters.items()}
        yield Quantity(f"parameters after step {number}", changes, rounded)


def limits(one: Record, moved: Record) -> list[dict[str, float]]:
    """How far each tensor of each quantity may be from that of ``one``.

    Raises:
        Abstained: both runs of one process do not begin alike, or are not finite.
    """
    if not one.steps:
        raise Abstained("the program took no step")
    if blind := [n for n, step in enumerate(one.steps, 1) if not step.gradients]:
        raise Abstained(f"no gradient of step {blind[0]} is seen")
    if [step.samples for step in one.steps] != [step.samples for step in moved.steps]:
        raise Abstained("two runs of one process read different samples; seed what it draws")
    by_moving = {name: 4 * one.eps * _largest(array) for name, array in one.initial.items()}
    is_alike = one.initial.keys() == moved.initial.keys()
    if not is_alike or _differing(one.initial, moved.initial, by_moving):
        raise Abstained("two runs of one process begin with different parameters; seed them")
    found = []
    every = zip(quantities(one, one.initial), quantities(moved, moved.initial), strict=True)
    for (where, own, rounded), (_, other, _) in every:
        gaps = {name: _largest(own[name] - other[name]) for name in own}
        sizes = {name: _largest(array) for name, array in own.items()}
        if not np.isfinite([*sizes.values(), *gaps.values()]).all():
            raise Abstained(f"{where}: numbers of one process are not finite")
        found.append(
            {
                name: TIMES * (gap + one.eps * sizes[name]) + FEW * one.eps * rounded.get(name, 0.0)
                for name, gap in gaps.items()
            }
        )
    return found


def judge(
    right: Record, allowed: list[dict[str, float]], found: Record, ranks: int, first: int = 0
) -> Judgement:
    """The verdict on a run of so many ranks, which begins behind step ``first``."""
    eps, right = right.eps, Record(right.initial, right.steps[first:])
    for number, (step, taken) in enumerate(zip(right.steps, found.steps), first + 1):
        if told := _other_samples(step.samples, taken.samples):
            word, text = told
            return Judgement("FAIL" if found.is_ours else word, f"samples of step {number}", text)
    if len(right.steps) != len(found.steps):
        text = f"there are {len(found.steps)}, and {len(right.steps)} of one process"
        return Judgement("FAIL", "number of steps", text)
    notes, loose = _of_samples(right, found), dict[str, None]()
    allowed = allowed[:1] + allowed[1 + 3 * first :]
    pairs = zip(quantities(right, right.initial, first), quantities(found, right.initial, first))
    for ((where, own, _), (_, other, _)), most in zip(pairs, allowed, strict=True):
        is_draw = not found.is_ours and where.startswith("initial")
        if differ := own.keys() ^ other.keys():
            return Judgement("ABSTAIN", where, f"names of parameters differ, as {min(differ)}")
        if names := _differing(own, other, most):
            text = _told(names, own, other, most, ranks, where)
            if found.draws and not is_draw:
                text = f"{found.draws} draws random numbers, others on each rank"
            word = "ABSTAIN" if found.draws or is_draw else "FAIL"
            return Judgement(word, where, ", ".join([text, *notes]))
        if where.startswith("initial"):
            continue
        least = eps**0.5 * _largest_of(own)  # smaller tensors need not be known as well
        blurred = [n for n, one in own.items() if most[n] > PART * max(least, _largest(one))]
        if 2 * len(blurred) > len(own) and not where.startswith("parameters"):
            text = f"{len(blurred)} of {len(own)} tensors cannot be compared: rounding hides them"
            return Judgement("ABSTAIN", where, text)
        loose |= dict.fromkeys(blurred)
    every = {name for step in right.steps for name in step.parameters}
    if loose:
        notes.append(f"{len(loose)} of {len(every)} tensors cannot be compared in each step")
    return Judgement("PASS", "", ", ".join([counted(len(found.steps), "step"), *notes]))


def is_same(one: Record, other: Record) -> bool:
    """Whether two runs have the same bits."""
    if [step.samples for step in one.steps] != [step.samples for step in other.steps]:
        return False
    both = (quantities(record, {}) for record in (one, other))
    return all(
        a.own.keys() == b.own.keys() and not _differing(a.own, b.own, dict.fromkeys(a.own, 0.0))
        for a, b in zip(*both, strict=True)
    )


def _since(begun: Array | None, one: Array) -> Array:
    return one if begun is None or begun.shape != one.shape else one - begun


def _largest(array: Array) -> float:
    return float(abs(array).max(initial=0))


def _largest_of(arrays: Mapping[str, Array]) -> float:
    return max(map(_largest, arrays.values()), default=0.0)


def _of_samples(right: Record, found: Record) -> list[str]:
    """Remarks on samples that do not differ."""
    if not all(step.samples for step in found.steps):
        return ["samples of some steps are not seen"]
    pairs = zip(right.steps, found.steps)
    times = max((len(two.samples) // len(one.samples) for one, two in pairs), default=1)
    return [f"each sample on {times} ranks"] * (times > 1)


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
    where: str,
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
    if where.startswith("parameters"):  # the gradients of the step are alike
        causes = {nearest: "its update is another, as by a rate that follows the number of ranks"}
    cause = f": {causes[nearest]}" if nearest in causes else ""
    return f"{name} is {nearest} of one process's{also}{cause}"
