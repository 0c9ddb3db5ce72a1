"""What a communicator was made with: as its caller says, or the environment."""

import os
from numbers import Real
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from collectives.environment import seconds, switch
from collectives.execution.transport.checked import CheckedTransport
from collectives.execution.transport.delayed import delayed
from collectives.execution.transport.mpi import MPITransport


class Settings(NamedTuple):
    """As :class:`~collectives.communicator.Communicator` takes them, in its order.

    Attributes:
        algorithm: name of what calls use that name none.
        check: whether every call is compared across ranks first.
        tuning: file of the table that ``auto`` goes by; ``None`` for the default one.
        timeout: seconds until the watchdog reports; ``None`` for no watchdog.
        device: how messages of device memory go: ``"auto"``, ``"direct"`` or ``"staged"``.
        transport: carries messages.
        reproducible: whether sums of floating-point numbers are exact, and rounded once.
        turns: whether ``auto`` tries native and ours by turns for calls that repeat.
    """

    algorithm: str = "auto"
    check: bool = False
    tuning: str | Path | None = None
    timeout: float | None = None
    device: str = "auto"
    transport: type[MPITransport] = MPITransport
    reproducible: bool = False
    turns: bool = False

    @classmethod
    def given(
        cls,
        algorithm: str,
        check: bool | None,
        tuning: str | Path | None,
        timeout: float | None,
        device: str | None,
        transport: type[MPITransport] | None,
        reproducible: bool,
        turns: bool | None,
    ) -> Self:
        """What is ``None`` is as the environment says.

        Raises:
            TypeError: a value is of another type.
            ValueError: the device or an environment variable has a value that is not allowed, or
                an algorithm is asked for with ``reproducible``.
        """
        _expect_types(check, tuning, timeout, transport, reproducible, turns)
        if check is None:
            check = switch("COLLECTIVES_CHECK")
        if turns is None:
            turns = switch("COLLECTIVES_TURNS")
        if timeout is None:
            timeout = seconds("COLLECTIVES_TIMEOUT")
        if device is None:
            device = os.environ.get("COLLECTIVES_DEVICE", "").strip() or "auto"
        if device not in ("auto", "direct", "staged"):
            raise ValueError(f"device={device!r} is none of auto, direct and staged")
        if transport is None:
            transport = _transport()
        if reproducible and algorithm != "auto":
            raise ValueError(
                f"reproducible=True does not go with algorithm={algorithm!r}: a sum has no order "
                "then; name algorithms in the calls that do not sum"
            )
        exact = bool(reproducible)
        return cls(algorithm, check, tuning, timeout, device, transport, exact, bool(turns))

    @property
    def has_checksums(self) -> bool:
        """Whether every message carries a checksum."""
        return self.transport.has_checksums

    @property
    def needs_messages(self) -> bool:
        """Whether nothing may be sent but by the transport."""
        return self.transport.has_checksums or self.transport.delays


def _transport() -> type[MPITransport]:
    """As the environment says."""
    seals, link = switch("COLLECTIVES_CHECKSUMS"), os.environ.get("COLLECTIVES_LINK", "").strip()
    if seals and link:
        raise ValueError(
            f"COLLECTIVES_LINK={link!r} and COLLECTIVES_CHECKSUMS: messages that arrive late carry "
            "no checksums; unset one of the two"
        )
    if not link:
        return CheckedTransport if seals else MPITransport
    try:
        return delayed(link)
    except ValueError as error:
        raise ValueError(f"COLLECTIVES_LINK={error}") from None


def _expect_types(
    check: object,
    tuning: object,
    timeout: object,
    transport: object,
    reproducible: object,
    turns: object,
) -> None:
    """Any text would be true, and a number an open file."""
    switches = bool | np.bool_
    is_switch = isinstance(check, switches)
    is_time = isinstance(timeout, Real) and not isinstance(timeout, bool)
    is_transport = isinstance(transport, type) and issubclass(transport, MPITransport)
    for name, value, fits, wanted in (
        ("check", check, is_switch, "True or False"),
        ("tuning", tuning, isinstance(tuning, str | Path), "a file's name or Path"),
        ("timeout", timeout, is_time, "a number of seconds"),
        ("transport", transport, is_transport, "MPITransport, CheckedTransport or a subclass"),
        ("turns", turns, isinstance(turns, switches), "True or False"),
    ):
        if value is not None and not fits:
            raise TypeError(f"{name}={value!r} must be {wanted}, or None for the default")
    if not isinstance(reproducible, switches):
        raise TypeError(f"reproducible={reproducible!r} must be True or False")
