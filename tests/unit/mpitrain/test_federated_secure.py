"""Secure sums: shares, keys, masks, and what is left when clients leave."""

from itertools import combinations

import numpy as np
import pytest

from mpitrain.federated import keys, secure, shamir
from mpitrain.federated.secure import Participant, RoundError, Unmasking

SECRET = bytes(range(224, 256))


@pytest.mark.parametrize("threshold", [1, 2, 4, 5])
def test_any_threshold_shares_give_the_secret(threshold):
    points = [1, 2, 5, 9, 300]
    dealt = dict(zip(points, shamir.shares(SECRET, points, threshold), strict=True))
    assert all(len(share) == shamir.SHARE_BYTES for share in dealt.values())
    for some in combinations(points, threshold):
        assert shamir.secret(shamir.at_zero(some), dealt) == SECRET


def test_fewer_shares_fit_every_secret():
    """With t - 1 shares known, each secret has a share at another point that goes with it."""
    points, threshold = [1, 2, 3], 3
    dealt = dict(zip(points, shamir.shares(SECRET, points, threshold), strict=True))
    factors = shamir.at_zero(points)
    known = sum(factors[p] * int.from_bytes(dealt[p], "big") for p in (1, 2))
    for other in (bytes(32), bytes([255]) * 32, SECRET):
        value = (int.from_bytes(other, "big") - known) * pow(factors[3], -1, shamir.PRIME)
        third = (value % shamir.PRIME).to_bytes(shamir.SHARE_BYTES, "big")
        assert shamir.secret(factors, {**dealt, 3: third}) == other


def test_two_clients_have_a_common_key_for_each_purpose():
    pytest.importorskip("cryptography")
    one, other, third = keys.Pair(), keys.Pair(), keys.Pair()
    common = one.common(other.public, b"a")
    assert common == other.common(one.public, b"a")
    assert len(common) == 32
    assert common not in (one.common(other.public, b"b"), one.common(third.public, b"a"))
    assert keys.Pair(one.private).public == one.public


def test_numbers_are_chacha20s():
    """RFC 8439, appendix A.1, test vector 1: key and nonce 0."""
    pytest.importorskip("cryptography")
    found = keys.numbers(bytes(32), 4)
    assert found.dtype == np.uint32
    assert found.tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_a_message_that_was_changed_is_refused():
    pytest.importorskip("cryptography")
    sealed = keys.seal(SECRET, 3, 4, b"shares")
    assert keys.unseal(SECRET, 3, 4, sealed) == b"shares"
    for sender, receiver, message in (
        (3, 4, sealed[:-1] + bytes([sealed[-1] ^ 1])),
        (4, 3, sealed),
        (3, 5, sealed),
    ):
        with pytest.raises(ValueError, match="was changed"):
            keys.unseal(SECRET, sender, receiver, message)


class Sum:
    """A secure sum of vectors in one process, with all messages of it."""

    def __init__(self, vectors, threshold):
        pytest.importorskip("cryptography")
        self.vectors, self.threshold = vectors, threshold
        self.clients = {number: Participant(number) for number in vectors}
        self.everybody = {number: one.public for number, one in self.clients.items()}
        for number, one in self.clients.items():
            for other, sealed in one.deal(self.everybody, threshold).items():
                assert len(sealed) == secure.MESSAGE_BYTES
                self.clients[other].hold(number, self.everybody[number], sealed)
        self.masked = {
            number: one.masked(vectors[number], self.everybody)
            for number, one in self.clients.items()
        }
        self.length = len(next(iter(vectors.values())))

    def total(self, survivors, telling=None):
        lost = [number for number in self.clients if number not in survivors]
        telling = survivors[: self.threshold] if telling is None else telling
        revealed = {n: self.clients[n].reveal(survivors, lost) for n in telling}
        server = Unmasking(self.everybody, survivors, self.threshold, revealed)
        found = sum(self.masked[n] for n in survivors)
        for number in self.clients:
            found = found - server.leftover(number, self.length)
        return found


def vectors(clients, length=50, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.integers(0, 2**32, length, dtype=np.uint32) for n in clients}


def test_whoever_leaves_the_sum_is_that_of_the_others():
    clients, threshold = (2, 7, 12, 17, 22), 3
    given = vectors(clients)
    for leaving in (0, 1, 2):
        for lost in combinations(clients, leaving):
            survivors = [n for n in clients if n not in lost]
            found = Sum(given, threshold).total(survivors, survivors[-threshold:])
            np.testing.assert_array_equal(found, sum(given[n] for n in survivors))


def test_fewer_than_the_threshold_cannot_unmask():
    made = Sum(vectors(range(5)), 4)
    with pytest.raises(RoundError, match="3 of 5 clients tell their shares, and 4 must"):
        made.total([0, 1, 2, 3], telling=[0, 1, 2])
    for survivors, asked, threshold, message in (
        (3, 5, 4, "5 clients has 3 left, and 4 must be left"),
        (2, 3, 2, "a sum hides nobody below 3"),
    ):
        with pytest.raises(RoundError, match=message):
            secure.expect_enough(survivors, asked, threshold)
    secure.expect_enough(3, 3, 2)


def test_a_masked_vector_looks_random_and_is_new_each_time():
    """Bytes of the masked vectors of zeros, by chi-square; 255 degrees, a billionth."""
    zeros = {n: np.zeros(4096, np.uint32) for n in range(3)}
    first, again = Sum(zeros, 2), Sum(zeros, 2)
    pair = first.masked[0] + first.masked[1]  # still under the third one's masks
    for masked in (*first.masked.values(), pair):
        counts, expected = np.bincount(masked.view(np.uint8), minlength=256), masked.nbytes / 256
        assert ((counts - expected) ** 2 / expected).sum() < 415
    for number in zeros:
        assert (first.masked[number] != again.masked[number]).mean() > 0.99


def test_nobody_tells_both_shares_of_a_client():
    made = Sum(vectors(range(3)), 2)
    with pytest.raises(RoundError, match="both shares"):
        made.clients[0].reveal([0, 1], [1, 2])
    made.clients[0].reveal([0, 1], [2])
    with pytest.raises(RoundError, match="both shares"):
        made.clients[0].reveal([0, 2], [1])


def test_wrong_shares_are_noticed():
    made = Sum(vectors(range(4)), 3)
    survivors, lost = [0, 1, 2], [3]
    revealed = {n: made.clients[n].reveal(survivors, lost) for n in survivors}
    revealed[1][3] = revealed[1][2]
    server = Unmasking(made.everybody, survivors, 3, revealed)
    with pytest.raises(RoundError, match="client 3"):
        server.leftover(3, 50)
