"""``mpitrain doctor``: finds faults of this machine or allocation, and says how to mend them."""

from pathlib import Path

from mpi4py import MPI

from mpitrain.doctor.devices import devices
from mpitrain.doctor.finding import Check, Finding, Status
from mpitrain.doctor.memory import node_memory
from mpitrain.doctor.network import gpus, messages, network, tuning
from mpitrain.doctor.placement import cores, ranks
from mpitrain.doctor.software import launcher, library, packages, threads
from mpitrain.doctor.storage import checkpoints

__all__ = ["CHECKS", "Finding", "Status", "doctor", "render"]

#: All checks, in the order in which a beginner needs them.
CHECKS: tuple[Check, ...] = (
    packages, library, threads, launcher, ranks, cores, node_memory, gpus, devices, network,
    messages, tuning, checkpoints,
)  # fmt: skip


def doctor(comm: MPI.Intracomm, folder: Path) -> int:
    """Run all checks, each on all ranks; rank 0 prints a line each.

    A check that fails with an exception on any rank is a finding, too; none is left waiting, as the
    ranks agree on each part of a check before the next one begins.

    Returns:
        1 if a check failed, else 0; the same on all ranks.
    """
    findings: list[Finding] = []
    for check in CHECKS:
        findings.append(check(comm, folder))
        if check is launcher and findings[-1].status is Status.FAIL:
            break  # the others would look at one process
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
