"""The axes of a layout, and all layouts along them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from mpitrain.nn.positions import Way
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.search.candidates import Candidate

#: Micro-batches for each stage; with more, a bubble is below an eighth.
_MOST = 8


@dataclass(frozen=True)
class Axes:
    """Parts of a model that ranks can share.

    Attributes:
        shareable: number that the ranks of a tensor group divide, such as that of the attention
            heads; 0 if the layers cannot be shared.
        positions: positions of a sample that tensor and context ranks may share; 0: none.
        experts: experts of a layer; 0: none.
        rows: rows of an image that context ranks may share; 0: none.
        spread: whether all replicas share tables.
    """

    shareable: int = 0
    positions: int = 0
    experts: int = 0
    rows: int = 0
    spread: bool = False

    def candidates(
        self, ranks: int, layers: int, batch: int, refused: Counter[str]
    ) -> Iterator[Candidate]:
        """All layouts of some ranks, whether they fit in memory or not.

        Args:
            ranks: number of ranks.
            layers: number of the model's layers.
            batch: samples of a step.
            refused: why others cannot be, with their number, which grows.
        """
        for context, tensor in product(divisors(ranks), repeat=2):
            if ranks % (context * tensor):
                continue
            if tensor > 1 and (not self.shareable or self.shareable % tensor):
                why = f"{self.shareable} heads that the tensor ranks do not divide"
                refused[why if self.shareable else "layers that no ranks share"] += 1
            elif context > 1 and context > max(self.positions, self.rows):
                refused["positions or rows that no ranks share"] += 1
            else:
                workers = ranks // context // tensor
                each = Candidate(
                    1, workers, tensor, context=context, rows=context > 1 and self.rows > 0
                )
                for pipe in divisors(workers):
                    shape = replace(each, pipe=pipe, data=workers // pipe)
                    if pipe > layers:
                        refused[f"more than {layers} stages, one for each layer"] += 1
                    elif batch % shape.data:
                        refused[f"replicas that do not divide the batch of {batch}"] += 1
                    else:
                        yield from self._even(shape, layers, batch)
                if workers > 1 and layers > 1 and not self.spread:
                    most = _MOST * min(workers, layers)
                    for m in (own for own in divisors(batch) if own <= most):
                        yield from self._variants(replace(each, micro_batches=m, deals=True))

    def _even(self, shape: Candidate, layers: int, batch: int) -> Iterator[Candidate]:
        """Layouts of stages of one width, with their schedules."""
        chunks = (2**power for power in range(1, layers.bit_length()))
        orders = [("interleaved", each) for each in chunks]
        for name, own in SCHEDULES.items():
            # GPipe takes as long as 1F1B and holds more.
            if own.chunks and own.synchronous and name != "gpipe":
                orders.append((name, own.chunks))
        for m in divisors(batch // shape.data):
            if m > _MOST * shape.pipe:
                break
            for schedule, each in orders if shape.pipe > 1 else [("1f1b", 1)]:
                runs = m % shape.pipe == 0
                if schedule != "interleaved":
                    # A V idles for the published time from 2p micro-batches on.
                    runs = each == 1 or m >= 2 * shape.pipe
                if each * shape.pipe <= layers and runs:
                    order = replace(shape, micro_batches=m, schedule=schedule, chunks=each)
                    yield from self._variants(order)

    def _variants(self, shape: Candidate) -> Iterator[Candidate]:
        levels = range(4) if shape.summing > 1 else range(1)
        for attention, experts in product(self.ways(shape), self._groups(shape)):
            pieces = shape.context * (1 + (attention == "zigzag")) if shape.context > 1 else 1
            shares = shape.tensor > 1 and self.positions
            among = bool(shares) and self.positions % (pieces * shape.tensor) == 0
            for sequence, zero, again in product((False, True)[: 1 + among], levels, (False, True)):
                yield replace(
                    shape, attention=attention, experts=experts,
                    sequence=sequence, zero=zero, recompute=again,
                )  # fmt: skip

    def ways(self, shape: Candidate) -> list[Way]:
        """Ways of attention; a ring's work is less even than zigzag's, which needs two pieces."""
        if shape.context == 1 or shape.rows:
            return ["zigzag"]
        found: list[Way] = ["zigzag" if self.positions >= 2 * shape.context else "ring"]
        if self.shareable and self.shareable % (shape.tensor * shape.context) == 0:
            found.append("ulysses")
        return found

    def _groups(self, shape: Candidate) -> list[int]:
        """Ranks over which experts or tables are spread."""
        if self.spread:
            return [0]
        return (
            [1] if shape.deals or not self.experts else divisors(gcd(shape.summing, self.experts))
        )


def divisors(number: int) -> list[int]:
    """The divisors of a number, in order."""
    return [d for d in range(1, number + 1) if number % d == 0]
