"""The settings of a communicator, from its caller or from the environment."""

import os
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from collectives import extras
from collectives.environment import choice, seconds, switch
from collectives.execution.transport.mpi import MPITransport


class Settings(NamedTuple):
    """As :class:`~collectives.communicator.Communicator` takes them, in its order.

    Attributes:
        algorithm: name of the algorithm for calls that name none.
        check: whether every call is compared across ranks first.
        tuning: file of the table that ``auto`` goes by; ``None`` for the default one.
        timeout: seconds until the watchdog reports; ``None`` for no watchdog.
        device: how messages of device memory go: ``"auto"``, ``"direct"`` or ``"staged"``.
        transport: carries messages.
        reproducible: whether sums of floating-point numbers are exact, and rounded once.
    """

    algorithm: str = "auto"
    check: bool = False
    tuning: str | Path | None = None
    timeout: float | None = None
    device: str = "auto"
    transport: type[MPITransport] = MPITransport
    reproducible: bool = False

    @classmethod
    def given(cls, algorithm: str, *values: Any) -> Self:
        """The settings as the caller gives them, in order; for ``None``, as the environment does.

        Raises:
            TypeError: a value is of another type.
            ValueError: the device or an environment variable has a value that is not allowed, or
                an algorithm is asked for with ``reproducible``.
        """
        given: dict[str, Any] = dict.fromkeys(cls._fields[1:]) | {"reproducible": False}
        given |= dict(zip(cls._fields[1:], values))
        _expect_types(given)
        if given["check"] is None:
            given["check"] = switch("COLLECTIVES_CHECK")
        if given["timeout"] is None:
            given["timeout"] = seconds("COLLECTIVES_TIMEOUT")
        if given["device"] is None:
            given["device"] = choice("COLLECTIVES_DEVICE", ("auto", "direct", "staged"))
        elif given["device"] not in ("auto", "direct", "staged"):
            raise ValueError(f"device={given['device']!r} is none of auto, direct and staged")
        given["transport"] = given["transport"] or _transport()
        if given["reproducible"] and algorithm != "auto":
            raise ValueError(
                f"reproducible=True does not go with algorithm={algorithm!r}: a sum has no order "
                "then; name algorithms in the calls that do not sum"
            )
        given["reproducible"] = bool(given["reproducible"])
        return cls(algorithm, **given)

    @property
    def has_checksums(self) -> bool:
        """Whether every message carries a checksum."""
        return self.transport.has_checksums

    @property
    def needs_messages(self) -> bool:
        """Whether nothing may be sent but by the transport."""
        return self.transport.has_checksums or self.transport.delays

    @property
    def parses_native(self) -> bool:
        """Whether calls by ``native`` are parsed, too, to be checked or replaced."""
        return self.check or self.reproducible or self.transport.delays


def _transport() -> type[MPITransport]:
    """As the environment says."""
    seals, link = switch("COLLECTIVES_CHECKSUMS"), os.environ.get("COLLECTIVES_LINK", "").strip()
    if seals and link:
        raise ValueError(
            f"COLLECTIVES_LINK={link!r} and COLLECTIVES_CHECKSUMS: messages that arrive late carry "
            "no checksums; unset one of the two"
        )
    if not link:
        return extras.CheckedTransport.load() if seals else MPITransport
    try:
        return extras.delayed(link)
    except ValueError as error:
        raise ValueError(f"COLLECTIVES_LINK={error}") from None


def _expect_types(given: dict[str, Any]) -> None:
    """Any text would be true, and a number an open file."""
    for name, fits, wanted in (
        ("check", _is_switch, "True or False"),
        ("tuning", lambda value: isinstance(value, str | Path), "a file's name or Path"),
        ("timeout", _is_time, "a number of seconds"),
        ("transport", _is_transport, "MPITransport, CheckedTransport or a subclass"),
    ):
        value = given[name]
        if value is not None and not fits(value):
            raise TypeError(f"{name}={value!r} must be {wanted}, or None for the default")
    if not _is_switch(given["reproducible"]):
        raise TypeError(f"reproducible={given['reproducible']!r} must be True or False")


def _is_switch(value: object) -> bool:
    return isinstance(value, bool | np.bool_)


def _is_time(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_transport(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, MPITransport)
