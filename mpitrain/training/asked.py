"""Wishes of the program for a run, after it has seen a record."""

from dataclasses import dataclass
from math import isfinite

from mpi4py import MPI

from mpitrain.ranks.same import expect_same


@dataclass
class Asked:
    """Wishes of the program's function that sees the records.

    Attributes:
        end: reason to end training after the last step; empty: it goes on.
        save: whether a checkpoint of the last step is wanted.
        factor: factor on the rates of all steps to come.
        is_open: whether the function runs now.
    """

    end: str = ""
    save: bool = False
    factor: float = 1.0
    is_open: bool = False

    def expect_open(self) -> None:
        """Raise RuntimeError unless the function runs now: nobody would see what is asked."""
        if not self.is_open:
            raise RuntimeError(
                "end(), save() and rate_factor act while on_record= of fit() is called; ask there"
            )

    def set_factor(self, factor: float) -> None:
        """Ask for another factor on the rates; ValueError: it is no finite number from 0 on."""
        self.expect_open()
        if not (isfinite(factor) and factor >= 0):
            raise ValueError(f"rate_factor: a finite number from 0 on, not {factor!r}")
        self.factor = float(factor)

    def agree(self, comm: MPI.Intracomm) -> None:
        """Raise ConfigError on all ranks unless they ask for the same; collective, 16 bytes."""
        told = {"end()": self.end, "save()": self.save, "rate_factor": self.factor}
        expect_same(comm, {f"{key} in on_record": one for key, one in told.items()})
