"""Clients of a round: the server asks some, and the changes of the first to arrive count.

Time is virtual and follows from the seed: a round has the same clients on one rank and on eight,
now and after a resume.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np

from mpitrain.arrays import Array
from mpitrain.compress.seeds import generator
from mpitrain.config.federated import Federated


@dataclass(frozen=True)
class Part:
    """Part of a client in a round.

    Attributes:
        draws: times that it was drawn and counts.
        steps: local steps that it takes.
        whole: whether it takes all steps that it was asked for.
        weight: weight of its change in the mean, a whole number.
    """

    client: int
    draws: int
    steps: int
    whole: bool
    weight: int


@dataclass(frozen=True)
class Cohort:
    """The clients of a round, whose number counts from 0.

    Attributes:
        draws: number of draws of clients that were asked.
        asked: clients that were asked, each once, rising.
        parts: clients whose changes count, rising.
        seconds: virtual time until the last of these is done.
    """

    number: int
    draws: int
    asked: tuple[int, ...]
    parts: tuple[Part, ...]
    seconds: float

    @property
    def taken(self) -> int:
        """Number of draws of clients that count."""
        return sum(part.draws for part in self.parts)

    @property
    def weight(self) -> int:
        return sum(part.weight for part in self.parts)


class Choice:
    """Draws the clients of each round.

    Attributes:
        work: local steps that each client is asked for.
        speeds: local steps a second, drawn once.
        rates: bytes a second that a client can send, drawn once.
    """

    def __init__(self, own: Federated, seed: int, sizes: Array, work: Array) -> None:
        """``sizes`` and ``work``: samples and steps of each client, of shape (clients,)."""
        self._own, self._seed, self._sizes = own, seed, sizes
        self.work = work
        normal = generator(seed, "clients", "speed").standard_normal(own.clients)
        self.speeds: Array = np.exp(own.spread * normal)
        normal = generator(seed, "clients", "bandwidth").standard_normal(own.clients)
        self.rates: Array = (own.bandwidth or inf) * np.exp(own.spread * normal)

    def most_weight(self) -> int:
        """Largest possible sum of the weights of a round's clients."""
        own = self._own
        if own.scheme == "weighted":
            each = self._sizes * (self.work if own.weigh == "work" else 1)
            return int(np.sort(each)[-own.asked :].sum())
        return own.asked * (int(self.work.max()) if own.weigh == "work" else 1)

    def ask(self, number: int) -> Array:
        """Clients that are asked in a round, one a draw; of shape (asked,)."""
        own, rng = self._own, generator(self._seed, "clients", "ask", number)
        if own.scheme == "weighted":
            return rng.choice(own.clients, own.asked, replace=False)
        return rng.choice(own.clients, own.asked, p=self._sizes / self._sizes.sum())

    def cohort(self, number: int, nbytes: Callable[[int], int] = lambda asked: 0) -> Cohort:
        """The clients of a round, counted from 0: the first ``take`` to arrive.

        ``nbytes``: bytes that each sends, of the number of clients that are asked.
        """
        own = self._own
        asked, draws = np.unique(self.ask(number), return_counts=True)
        dice = generator(self._seed, "clients", "dropout", number).random(own.clients)
        arrivals, sent = [], nbytes(len(asked))
        for client, times in zip(asked.tolist(), draws.tolist()):
            steps, at = self._until(client, sent)
            if steps and dice[client] >= own.dropout:
                share = steps / int(self.work[client])
                arrivals.append((at, -share, client, times, steps))
        parts, left, seconds = [], own.taken, 0.0
        for at, _, client, times, steps in sorted(arrivals):
            if not left:
                break
            count = min(times, left)
            left -= count
            seconds = at
            whole = steps == int(self.work[client])
            weight = self._weight(client, count, steps)
            parts.append(Part(client, count, steps, whole, weight))
        rising = tuple(sorted(parts, key=lambda part: part.client))
        return Cohort(number, own.asked, tuple(asked.tolist()), rising, seconds)

    def _until(self, client: int, nbytes: int) -> tuple[int, float]:
        """Steps that a client has done when it sends its change, and when that has arrived."""
        work, speed = int(self.work[client]), float(self.speeds[client])
        sending, deadline = nbytes / float(self.rates[client]), self._own.deadline
        if deadline and work / speed + sending > deadline:
            return max(0, min(int((deadline - sending) * speed), work)), deadline
        return work, work / speed + sending

    def _weight(self, client: int, draws: int, steps: int) -> int:
        own = self._own
        base = int(self._sizes[client]) if own.scheme == "weighted" else draws
        return base * steps if own.weigh == "work" else base
