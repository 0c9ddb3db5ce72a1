"""Kinds of faults, drawn from a seed, and the words of a job that fails of them."""

import random
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    text: str  # the fault in words
    inside: bool  # a rank does it to itself; else it is done around the job
    #: The job is to end as if nothing had happened; else it is to fail, say why, and be resumed.
    survives: bool
    named: str  # regular expression of what a failing job must say, of {rank}
    settings: tuple[str, ...] = ()  # of the job, without which the fault would go unnoticed


KINDS = {
    "kill": Kind("a rank is killed", True, False, r"(?i)rank:? {rank}\b"),
    "daemon": Kind(
        "the launcher's daemon on a rank's node is killed", True, False,
        r"launcher's on this node, is gone|lost communication|process manager error|"
        r"launcher was killed by signal 9",
    ),
    "pause": Kind("a rank stands still for a while", True, True, ""),
    "freeze": Kind(
        "a rank stands still for good", True, False,
        r"rank {rank} on \S+ (does not answer|is gone): it (is|has) ",
    ),
    "payload": Kind(
        "a bit of a message changes", True, False,
        r"step {step}: .*a message of \d+ bytes from rank \d+ arrived changed",
        ("parallel.checksums=true",),
    ),
    "memory": Kind(
        "a bit of a rank's parameters changes", True, False,
        r"replicas differ [^\n]*step {step}: rank \d|not finite at step {step} \(",
        ("run.check_every=1",),
    ),
    "full": Kind("the disk of the checkpoints is full", False, False, r"No space left on device"),
    "readonly": Kind(
        "the folder of the checkpoints turns read-only", False, False,
        r"Read-only file system|nothing can be written there",
    ),
    "cut": Kind("the link of a host is cut", False, False, r"(?i)does not answer|lost|unreachable"),
    "slow": Kind("the link of a host is slowed down", False, True, ""),
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    kind: str  # name in KINDS
    rank: int  # the one that it hits, if it hits one
    step: int  # before which it happens, counted from 1
    seconds: float = 0.0  # length of a pause, or time into the step at which the fault happens
    seed: int = 0  # of all other random choices

    def __str__(self) -> str:
        return (
            f"{self.kind} rank={self.rank} step={self.step} seconds={self.seconds:g} "
            f"seed={self.seed}"
        )

    def named(self) -> re.Pattern[str]:
        pattern = KINDS[self.kind].named
        return re.compile(
            pattern.replace("{rank}", str(self.rank)).replace("{step}", str(self.step)), re.DOTALL
        )


def draw(kind: str, seed: int, ranks: int, steps: int) -> Fault:
    """A fault of a kind, at a place in a job that depends on the seed."""
    rng = random.Random(f"{kind} {seed}")
    # Not in the last steps: the job might be over before something outside of it happens.
    step = rng.randrange(2, max(3, steps - steps // 8))
    seconds = rng.uniform(0.3, 1.5) if kind == "pause" else rng.uniform(0.0, 0.02)
    return Fault(kind, rng.randrange(ranks), step, round(seconds, 4), seed)


def parse(text: str) -> Fault:
    """A fault as its ``str`` writes it; what is left out is 0, but for the step."""
    kind, *pairs = text.replace(",", " ").split() or [""]
    if kind not in KINDS:
        raise ValueError(f"no fault {kind!r}; there are {', '.join(KINDS)}")
    values: dict[str, Any] = {"rank": 0, "step": 1}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in ("rank", "step", "seconds", "seed"):
            raise ValueError(f"{pair!r} is no part of a fault; there are rank, step, seconds, seed")
        try:
            values[key] = float(value) if key == "seconds" else int(value)
        except ValueError:
            raise ValueError(f"{pair!r} has no number") from None
    return Fault(kind, **values)
