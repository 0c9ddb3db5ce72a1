"""Secure aggregation: the sum of clients' vectors, without any client's own.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017),
for clients and a server that are honest but curious:

1. Each client tells all others two public keys: one for masks, one for messages.
2. Each draws a seed, and sends every other one a share of it and of its secret mask key.
3. Each sends its vector plus the numbers of its seed, and plus or minus those that follow from the
   common key with each other client: what the one adds, the other subtracts.  Numbers are of 32
   bits and go round, so their sum is exact in any order.
4. The others reveal their shares of the seed of a client that has sent its vector, or of the mask
   key of a client that has left; never both, which would show its vector.  The server subtracts the
   numbers of the seeds from the sum, and the masks of lost clients that are left in it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from os import urandom

import numpy as np

from mpitrain.arrays import Array
from mpitrain.federated.keys import KEY_BYTES, TAG_BYTES, Pair, numbers, seal, unseal
from mpitrain.federated.shamir import SHARE_BYTES, at_zero, secret, shares
from mpitrain.ranks.together import SharedError

_MASK, _MESSAGE = b"mpitrain federated mask", b"mpitrain federated message"
#: Bytes of the two public keys of a client.
PUBLIC_BYTES = 2 * KEY_BYTES
#: Bytes of the message with two shares.
MESSAGE_BYTES = 2 * SHARE_BYTES + TAG_BYTES


class RoundError(SharedError):
    """A round has no result: too few clients are left, or their shares do not fit."""


@dataclass(frozen=True)
class Public:
    """Public keys of a client, for masks and for messages, 32 bytes each."""

    mask: bytes
    message: bytes


class Participant:
    """A client in one secure sum, for which it draws its numbers anew."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._mask, self._message = Pair(), Pair()
        self._seed = urandom(KEY_BYTES)
        self._common: dict[int, bytes] = {}
        self._held: dict[int, tuple[bytes, bytes]] = {}
        self._revealed = False

    @property
    def public(self) -> Public:
        return Public(self._mask.public, self._message.public)

    def deal(self, everybody: Mapping[int, Public], threshold: int) -> dict[int, bytes]:
        """The sealed shares of its secrets, by client of the sum; it keeps its own."""
        points = [number + 1 for number in everybody]
        seeds = shares(self._seed, points, threshold)
        keys = shares(self._mask.private, points, threshold)
        found = {}
        for other, of_seed, of_key in zip(everybody, seeds, keys, strict=True):
            if other == self.number:
                self._held[other] = (of_seed, of_key)
                continue
            common = self._with(other, everybody[other])
            found[other] = seal(common, self.number, other, of_seed + of_key)
        return found

    def hold(self, sender: int, public: Public, sealed: bytes) -> None:
        """Keep the shares of another client; ``ValueError``: they were changed on their way."""
        both = unseal(self._with(sender, public), sender, self.number, sealed)
        self._held[sender] = (both[:SHARE_BYTES], both[SHARE_BYTES:])

    def _with(self, other: int, public: Public) -> bytes:
        """The key of messages with another client."""
        if other not in self._common:
            self._common[other] = self._message.common(public.message, _MESSAGE)
        return self._common[other]

    def masked(self, vector: Array, everybody: Mapping[int, Public]) -> Array:
        """The vector of uint32 with all masks, which it sends."""
        found = vector + numbers(self._seed, vector.size)
        for other, public in everybody.items():
            if other != self.number:
                found += _between(self._mask, self.number, other, public.mask, vector.size)
        return found

    def reveal(self, survivors: Collection[int], lost: Collection[int]) -> dict[int, bytes]:
        """Its shares of survivors' seeds and of lost clients' mask keys; once.

        Raises:
            RoundError: it is asked for both of a client, or a second time.
        """
        if self._revealed or set(survivors) & set(lost):
            raise RoundError(
                "a client was asked for both shares of another one, which would show its vector"
            )
        self._revealed = True
        found = {number: self._held[number][0] for number in survivors}
        return found | {number: self._held[number][1] for number in lost}


def expect_enough(survivors: int, asked: int, threshold: int) -> None:
    """Check that a sum of survivors can be unmasked, and hides each of them.

    Raises:
        RoundError: it cannot, or does not.
    """
    if survivors < max(threshold, 3):
        least = f"{threshold} must be left" if threshold > 2 else "a sum hides nobody below 3"
        raise RoundError(
            f"the secure sum of {asked} clients has {survivors} left, and {least}; ask more "
            "clients, or make federated.deadline longer"
        )


class Unmasking:
    """The server's work after the survivors have revealed their shares."""

    def __init__(
        self,
        everybody: Mapping[int, Public],
        survivors: Sequence[int],
        threshold: int,
        revealed: Mapping[int, Mapping[int, bytes]],
    ) -> None:
        """Keep the shares of ``threshold`` survivors.

        Args:
            everybody: the public keys of all clients.
            survivors: the clients whose vectors are in the sum.
            threshold: shares that give a secret.
            revealed: shares of each client's secret, by survivor.

        Raises:
            RoundError: too few survivors have revealed theirs.
        """
        if len(revealed) < threshold:
            raise RoundError(
                f"{len(revealed)} of {len(everybody)} clients tell their shares, and {threshold} "
                "must"
            )
        self._everybody = everybody
        self._survivors = list(survivors)
        self._from = sorted(revealed)[:threshold]
        self._factors = at_zero([number + 1 for number in self._from])
        self._revealed = revealed

    def leftover(self, client: int, length: int) -> Array:
        """A client's remainder in the sum of masked vectors, uint32 of this length.

        It is its seed's numbers if it survived, else its masks with all survivors.

        Raises:
            RoundError: the shares do not fit.
        """
        own = {number + 1: self._revealed[number][client] for number in self._from}
        try:
            found = secret(self._factors, own)
        except ValueError as error:
            raise RoundError(f"client {client}: {error}") from error
        if client in self._survivors:
            return numbers(found, length)
        mask = Pair(found)
        if mask.public != self._everybody[client].mask:
            raise RoundError(f"client {client}: the shares give another key than it has told")
        total = np.zeros(length, np.uint32)
        for survivor in self._survivors:  # survivors have the other sign
            total -= _between(mask, client, survivor, self._everybody[survivor].mask, length)
        return total


def _between(own: Pair, number: int, other: int, public: bytes, length: int) -> Array:
    """The mask that a client adds for another one, which adds the negative."""
    found = numbers(own.common(public, _MASK), length)
    return found if number < other else np.zeros(1, np.uint32) - found
