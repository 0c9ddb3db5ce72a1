"""Keys of two clients, the numbers that follow from them, and sealed messages.

X25519 (RFC 7748) gives two clients a common secret from each other's public key, HKDF (RFC 5869) a
key of 256 bits from that, ChaCha20 (RFC 8439) as many numbers from the key as a change has.  The
package cryptography has all three.
"""

import os
from importlib.util import find_spec

import numpy as np

from collectives.errors import install
from mpitrain.arrays import Array
from mpitrain.config import ConfigError

#: Bytes of a key, secret or public.
KEY_BYTES = 32
#: Bytes that sealing adds to a message.
TAG_BYTES = 16


def check() -> None:
    """Raise :class:`ConfigError` if the package is not installed."""
    if find_spec("cryptography") is None:
        cure = install("cryptography", "secure")
        raise ConfigError(f"federated.secure needs cryptography: {cure}")


class Pair:
    """A secret key and its public one, of 32 bytes."""

    def __init__(self, private: bytes | None = None) -> None:
        """``private``: 32 bytes; the system's random ones if left out."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._key = X25519PrivateKey.from_private_bytes(
            os.urandom(KEY_BYTES) if private is None else private
        )
        self.public = self._key.public_key().public_bytes_raw()

    @property
    def private(self) -> bytes:
        return self._key.private_bytes_raw()

    def common(self, public: bytes, purpose: bytes) -> bytes:
        """The key of 32 bytes that the owner of ``public`` finds, too, for this purpose."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        secret = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose).derive(secret)


def numbers(key: bytes, count: int) -> Array:
    """Pseudo-random numbers of 32 bits that follow from a key; uint32.

    A key is used once, so its nonce is 0.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(4 * count)), "<u4").astype(np.uint32, copy=False)


def seal(key: bytes, sender: int, receiver: int, message: bytes) -> bytes:
    """Encrypt and authenticate a message; the result is 16 bytes longer.

    Two clients share a key, and each of them sends one message: the sender is the nonce.
    """
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    nonce, about = sender.to_bytes(12, "big"), receiver.to_bytes(8, "big")
    return ChaCha20Poly1305(key).encrypt(nonce, message, about)


def unseal(key: bytes, sender: int, receiver: int, sealed: bytes) -> bytes:
    """The message of :func:`seal`; ``ValueError``: it was changed, or belongs to another client."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    nonce, about = sender.to_bytes(12, "big"), receiver.to_bytes(8, "big")
    try:
        return ChaCha20Poly1305(key).decrypt(nonce, sealed, about)
    except InvalidTag as error:
        raise ValueError(f"the message of client {sender} to {receiver} was changed") from error
