"""Counts of the messages and bytes that a rank sends, where its messages start."""

from dataclasses import dataclass


@dataclass
class Traffic:
    """Counts of one rank; each run of a collective adds to it.

    Attributes:
        messages: messages that were started, without the headers of a sparse all-reduce.
        sent: bytes in them, with the headers.
        dense: bytes that vectors would have taken in the messages of sparse all-reduces.
        shared: bytes stored into other ranks' memory, or loaded from it, in the place of messages.
        native: collectives that were left to the MPI library, which does not say what it sends.
        native_bytes: bytes that each rank sends in them at least, by any algorithm; known of plans,
            and of calls on plain arrays without a root.
    """

    messages: int = 0
    sent: int = 0
    dense: int = 0
    shared: int = 0
    native: int = 0
    native_bytes: int = 0

    def send(self, messages: int, nbytes: int) -> None:
        """Messages start."""
        self.messages += messages
        self.sent += nbytes

    def share(self, nbytes: int) -> None:
        """A run in shared memory starts, which moves ``nbytes``."""
        self.shared += nbytes

    def leave(self, nbytes: int) -> None:
        """The MPI library's own collective starts, which sends ``nbytes`` at least."""
        self.native += 1
        self.native_bytes += nbytes
