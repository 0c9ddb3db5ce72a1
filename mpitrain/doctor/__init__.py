"""``mpitrain doctor``: what is wrong with this machine or allocation, and what to do about it."""

from pathlib import Path

from mpi4py import MPI

from mpitrain.doctor.checks import CHECKS
from mpitrain.doctor.finding import Finding, Status

__all__ = ["Finding", "Status", "doctor", "render"]


def doctor(comm: MPI.Intracomm, folder: Path) -> int:
    """Run all checks, each on all ranks; rank 0 prints a line each.

    A check that fails with an exception on any rank is a finding, too; none is left waiting, as the
    ranks agree on each check's local part before the part that communicates.

    Returns:
        1 if a check failed, else 0; the same on all ranks.
    """
    findings = [check(comm, folder) for check in CHECKS]
    if comm.rank == 0:
        print("\n".join(render(finding) for finding in findings))
        failed = sum(finding.status is Status.FAIL for finding in findings)
        warned = sum(finding.status is Status.WARN for finding in findings)
        print(f"{len(findings)} checks, {failed} failed, {warned} to look at")
    return int(comm.bcast(any(finding.status is Status.FAIL for finding in findings)))


def render(finding: Finding) -> str:
    """One line, and the fix if one is needed."""
    line = f"{finding.status.value:<4} {finding.name:<12} {finding.text}"
    return f"{line}\n     {'':<12} -> {finding.fix}" if finding.fix else line
