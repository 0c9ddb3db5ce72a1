"""The mean of the changes of a round's clients, by sums of whole numbers.

It has the same bits on any number of ranks.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from mpitrain.arrays import Array
from mpitrain.config import ConfigError
from mpitrain.config.federated import Federated
from mpitrain.federated import codes
from mpitrain.federated.choice import Cohort
from mpitrain.federated.exact_mean import Grid, difference
from mpitrain.federated.secure import (
    MESSAGE_BYTES,
    PUBLIC_BYTES,
    Participant,
    Public,
    RoundError,
    Unmasking,
    expect_enough,
)
from mpitrain.federated.shamir import SHARE_BYTES
from mpitrain.ranks.together import together
from mpitrain.training.account import traffic_of


@dataclass(frozen=True)
class Mean:
    """The mean change of a round.

    Attributes:
        change: the change as a sum of two arrays, float64.
        client_bytes: most bytes that a client sends, with its code, keys and shares.
        key_bytes: bytes of keys and shares that this rank has sent for its clients.
        clipped: part of the numbers sent that were cut to the grid.
    """

    change: tuple[Array, Array]
    client_bytes: int
    key_bytes: int = 0
    clipped: float = 0.0


class Wire:
    """All-reduces of whole numbers in place.

    Attributes:
        comm: the ranks.
        algorithm: algorithm of the all-reduces; a ring in the place of ``auto``, which may leave
            them to the MPI library, of whose bytes the least alone is known.
        seconds: seconds of all of them.
    """

    def __init__(self, comm: Communicator, algorithm: str) -> None:
        self.comm = comm
        self.algorithm = "ring" if algorithm == "auto" else algorithm
        self.seconds = 0.0
        self._traffic = traffic_of(comm)

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent so far, or moved in memory that it shares."""
        return self._traffic.sent + self._traffic.native_bytes + self._traffic.shared

    def add(self, total: Array) -> None:
        begun = perf_counter()
        if self.comm.size > 1:
            self.comm.Allreduce(MPI.IN_PLACE, total.reshape(-1), algorithm=self.algorithm)
        self.seconds += perf_counter() - begun

    def largest(self, every: Iterable[Array]) -> float:
        """The largest magnitude in the arrays of all ranks."""
        own = max((float(np.abs(values).max()) for values in every), default=0.0)
        found: float = self.comm.allreduce(own, op=MPI.MAX)
        return found


class Exact:
    """Changes with all bits; a client sends them in the weights' own type."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def client_bytes(self, start: Array, asked: int) -> int:
        """Most bytes that a client sends of a change from ``start``, if so many are asked."""
        return start.nbytes

    def mean(self, start: Array, ends: Mapping[int, Array], cohort: Cohort) -> Mean:
        """The weighted mean of ``start - end``; collective.

        ``ends``: final flat weights of the cohort's clients on this rank.
        """
        changes = (difference(start, end)[0] for end in ends.values())
        largest = self._wire.largest(changes)
        grid = Grid.of(largest, cohort.weight)
        total = np.zeros((2, start.size), np.int64)
        for part in cohort.parts:
            if part.client in ends:
                total += part.weight * grid.words(difference(start, ends[part.client]))
        self._wire.add(total)
        return Mean(grid.mean(total, cohort.weight), start.nbytes)


class Coded:
    """Changes as numbers on a grid; sums are whole numbers of the narrowest type that fits."""

    def __init__(self, wire: Wire, own: Federated, seed: int, most_weight: int) -> None:
        """Choose the bits, if the job does not.

        Raises:
            ConfigError: secure sums of such codes have more than 32 bits.
        """
        self._wire, self._own, self._seed = wire, own, seed
        fitting = codes.most_bits(most_weight, 32 if own.secure else 63)
        self.bits = own.bits or min(24, fitting)
        if min(self.bits, fitting) < max(self.bits, 2):
            raise ConfigError(
                f"federated.bits: weights of up to {most_weight} in a round leave {fitting} of the "
                f"secure sum's 32 bits to a number, not {max(self.bits, 2)}; ask fewer clients, or "
                "set scheme = 'sampled'"
            )

    def client_bytes(self, start: Array, asked: int) -> int:
        """As :meth:`Exact.client_bytes`."""
        return -(-codes.lengths(self._own, start.size)[1] * self.bits // 8) + _BESIDE

    def mean(self, start: Array, ends: Mapping[int, Array], cohort: Cohort) -> Mean:
        """As :meth:`Exact.mean`; ``RoundError`` if too few clients are left for a secure sum."""
        drawn = codes.Drawn.of(self._own, self._seed, cohort.number, start.size)
        sent = {client: drawn.sent(difference(start, end)[0]) for client, end in ends.items()}
        found = self._wire.largest(sent.values())
        steps = codes.CodeGrid(self.bits, self._own.clip or found)
        cut = sum(int((np.abs(values) > steps.largest).sum()) for values in sent.values())
        weights = {part.client: part.weight for part in cohort.parts}

        def words() -> Iterator[tuple[int, Array]]:
            """Places on the grid times the weight, and the weight, for each own client."""
            for client, values in sent.items():
                places = steps.encode(values, codes.dice(self._seed, cohort.number, client))
                yield client, weights[client] * np.append(places, 1)

        total, key_bytes = self._sum(words(), drawn.kept.size + 1, cohort)
        client_bytes = self.client_bytes(start, len(cohort.asked))
        change = drawn.back(steps.mean(total[:-1], int(total[-1])))
        numbers = drawn.kept.size * len(cohort.parts)
        clipped = self._wire.comm.allreduce(cut) / numbers
        return Mean((change, np.zeros_like(change)), client_bytes, key_bytes, clipped)

    def _sum(
        self, own: Iterator[tuple[int, Array]], length: int, cohort: Cohort
    ) -> tuple[Array, int]:
        """The sum over all clients, and bytes of this rank's keys."""
        most = cohort.weight * (2**self.bits - 1)
        kind = next(kind for kind in (np.uint16, np.uint32, np.int64) if most <= np.iinfo(kind).max)
        total: Array = np.zeros(length, kind)
        for _, words in own:
            total += words.astype(total.dtype)
        self._wire.add(total)
        return total, 0


class Secure(Coded):
    """Numbers on a grid, added up so that nobody learns a single client's."""

    def client_bytes(self, start: Array, asked: int) -> int:
        keys = PUBLIC_BYTES + (asked - 1) * MESSAGE_BYTES
        return 4 * (codes.lengths(self._own, start.size)[1] + 1) + keys + asked * SHARE_BYTES

    def _sum(
        self, own: Iterator[tuple[int, Array]], length: int, cohort: Cohort
    ) -> tuple[Array, int]:
        comm = self._wire.comm
        threshold = self._own.least(len(cohort.asked))
        survivors = [part.client for part in cohort.parts]
        expect_enough(len(survivors), len(cohort.asked), threshold)
        lost = [client for client in cohort.asked if client not in set(survivors)]
        mine = {
            client: Participant(client)
            for client in cohort.asked
            if client % comm.size == comm.rank
        }
        everybody: dict[int, Public] = {}
        for some in comm.allgather({client: one.public for client, one in mine.items()}):
            everybody |= some
        everybody = dict(sorted(everybody.items()))
        self._exchange_shares(mine, everybody, threshold)
        total = np.zeros(length, np.uint32)
        for client, words in own:
            total += mine[client].masked(words.astype(np.uint32), everybody)
        self._wire.add(total)
        # Any ``threshold`` survivors' shares will do.
        revealed: dict[int, dict[int, bytes]] = {}
        told = {c: mine[c].reveal(survivors, lost) for c in survivors[:threshold] if c in mine}
        for shares in comm.allgather(told):
            revealed |= shares
        unmasking = Unmasking(everybody, survivors, threshold, revealed)

        def leftover() -> Array:
            found = np.zeros(length, np.uint32)
            for client in mine:
                found += unmasking.leftover(client, length)
            return found

        masks = together(comm, leftover, RoundError)
        self._wire.add(masks)
        total -= masks
        shown = len(cohort.asked) * SHARE_BYTES
        # Keys and shares go to all other ranks, sealed shares to that of their client.
        elsewhere = sum(client not in mine for client in cohort.asked)
        sealed = len(mine) * elsewhere * MESSAGE_BYTES
        open_ = (len(mine) * PUBLIC_BYTES + len(told) * shown) * (comm.size - 1)
        return total, sealed + open_

    def _exchange_shares(
        self, mine: Mapping[int, Participant], everybody: Mapping[int, Public], threshold: int
    ) -> None:
        """Give each client its shares of all others' secrets, by an all-to-all."""
        comm = self._wire.comm
        boxes: list[list[tuple[int, int, bytes]]] = [[] for _ in range(comm.size)]
        for client, one in mine.items():
            for other, sealed in one.deal(everybody, threshold).items():
                boxes[other % comm.size].append((client, other, sealed))
        for box in comm.alltoall(boxes):
            for sender, receiver, sealed in box:
                mine[receiver].hold(sender, everybody[sender], sealed)


#: Bits of the sum of a round's weights; two words of 60 bits less these still have 40.
_MOST_BITS = 40
#: Bytes that go with a client's code: its weight and the largest element.
_BESIDE = 8


def sums(wire: Wire, own: Federated, seed: int, most_weight: int) -> Exact | Coded:
    """The sums that the table asks for; ``seed`` and ``most_weight`` as for :class:`Coded`.

    Raises:
        ConfigError: the weights leave no room for the numbers that they weigh.
    """
    if most_weight.bit_length() > _MOST_BITS:
        raise ConfigError(
            f"federated: the weights of a round's clients add up to {most_weight}, and the sums "
            f"have room for less than 2**{_MOST_BITS}; ask fewer clients, or set weigh = "
            "'samples'"
        )
    if not own.is_coded:
        return Exact(wire)
    return (Secure if own.secure else Coded)(wire, own, seed, most_weight)
