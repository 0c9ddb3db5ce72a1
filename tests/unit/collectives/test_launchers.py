"""Processes, what launchers tell them, and which of them are refused."""

import pytest

from collectives.errors import LaunchError
from collectives.launchers import LAUNCHERS, PREFIXES, check_launch, excess

#: Variables told to one process of several, as the launchers' own output and sources have them.
TOLD = {
    "srun": {
        "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0",
    },
    "srun --mpi=pmi2": {
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "PMI_FD": "11", "PMI_SIZE": "4",
        "PMI_RANK": "0",
    },
    "srun --mpi=pmix": {
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "PMIX_NAMESPACE": "slurm.pmix.5.0",
        "PMIX_RANK": "1",
    },
    "srun --mpi=cray_shasta": {
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "PALS_APID": "7.0", "PALS_RANKID": "0",
    },
    "PALS --pmi=cray": {"PALS_RANKID": "0", "PALS_NODEID": "0", "PMI_RANK": "0", "PMI_SIZE": "4"},
    "PALS --pmi=pmix": {"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "4", "PMIX_RANK": "0"},
    "PALS, a rank on each node": {"PALS_RANKID": "3", "PALS_LOCAL_SIZE": "1", "PMIX_RANK": "3"},
    "flux": {"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
    "torchrun": {
        "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "4",
        "TORCHELASTIC_RUN_ID": "none",
    },
    "deepspeed": {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},
    "mpiexec of MPICH": {
        "PMI_FD": "9", "PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": "0",
    },
    "mpiexec -pmi-port": {"PMI_PORT": "n0:1", "PMI_ID": "0", "MPI_LOCALNRANKS": "4"},
    "mpirun of Open MPI 5": {
        "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0",
        "PRTE_LAUNCHED": "1",
    },
    "mpirun of Open MPI 4": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"},
    "mpirun_rsh": {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "0"},
    "prun": {"PMIX_NAMESPACE": "prte@1", "PMIX_RANK": "3"},
}  # fmt: skip
CRAY, HYDRA = "Cray's mpiexec or srun", "mpiexec of MPICH or Intel MPI"
#: Their names in ``LAUNCHERS``, where these are others.
NAMES = {
    "srun --mpi=pmi2": "srun", "srun --mpi=pmix": "srun", "srun --mpi=cray_shasta": CRAY,
    "PALS --pmi=cray": CRAY, "PALS --pmi=pmix": CRAY, "PALS, a rank on each node": CRAY,
    "flux": "flux run", "deepspeed": "a launcher that sets RANK", "mpiexec of MPICH": HYDRA,
    "mpiexec -pmi-port": HYDRA, "mpirun of Open MPI 5": "Open MPI's mpirun",
    "mpirun of Open MPI 4": "Open MPI's mpirun", "mpirun_rsh": "MVAPICH's mpirun_rsh",
    "prun": "a launcher with PMIx",
}  # fmt: skip


@pytest.mark.parametrize("vendor", ["Open MPI", "MPICH", "Intel MPI"])
@pytest.mark.parametrize("kind", TOLD)
def test_one_of_several_processes_that_believes_it_is_alone_is_refused(kind, vendor):
    launcher, started = excess(1, vendor, TOLD[kind])
    assert launcher.name == NAMES.get(kind, kind)
    assert started.processes == 4
    assert TOLD[kind][started.variable] == str(started.value)
    cure = launcher.cure(vendor, started.processes)
    assert "{" not in cure
    assert "mpirun" in cure or "--mpi" in cure or "-o pmi" in cure or "build mpi4py" in cure
    # MPI sees all of them.
    assert excess(4, vendor, TOLD[kind]) is excess(5, vendor, TOLD[kind]) is None


@pytest.mark.parametrize(
    ("vendor", "kind"),
    [("Open MPI", "srun"), ("MPICH", "srun --mpi=pmi2"), ("MPICH", "torchrun"),
     ("Open MPI", "prun"), ("Open MPI", "mpirun of Open MPI 5")],
)  # fmt: skip
def test_two_jobs_of_two_in_a_launch_of_four_are_refused(vendor, kind):
    assert excess(2, vendor, TOLD[kind]) is not None


OMPI_1 = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
HYDRA_1 = {"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"}


@pytest.mark.parametrize(
    ("size", "vendor", "told"),
    [
        (1, "Open MPI", {}),
        (1, "Open MPI", {"WORLD_SIZE": "4"}),
        (1, "Open MPI", {"RANK": "0", "WORLD_SIZE": "1"}),
        (1, "Open MPI", {"RANK": "7"}),
        # A shell or a notebook in an allocation, or in a step of one process.
        (1, "Open MPI", {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}),
        (1, "MPICH", {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}),
        (4, "MPICH", {**TOLD["mpiexec of MPICH"], "SLURM_STEP_NUM_TASKS": "1"}),
        (1, "MPICH", {"PMI_SIZE": ""}),
        (1, "MPICH", HYDRA_1),
        # Daemons that srun has started, one on each of 8 nodes, and mpirun's ranks on two of them.
        (2, "Open MPI", {
            "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1",
        }),
        # Four tasks, each of which starts a job of one rank by itself.
        (1, "Open MPI", {**TOLD["srun"], "SLURM_PROCID": "3", **OMPI_1}),
        (1, "MPICH", {**TOLD["srun --mpi=pmix"], **HYDRA_1}),
        (1, "MPICH", {**TOLD["PALS --pmi=pmix"], **HYDRA_1}),
        # A spawned process of its own world.
        (1, "Open MPI", OMPI_1),
    ],
)  # fmt: skip
def test_what_is_meant_is_not_refused(size, vendor, told):
    assert excess(size, vendor, told) is None


@pytest.mark.parametrize(
    ("vendor", "told"),
    [
        # A shell of one task, and another MPI's mpirun in it.
        ("MPICH", {**TOLD["mpirun of Open MPI 5"], "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1"}),
        ("Open MPI", {**TOLD["mpiexec of MPICH"], "SLURM_STEP_NUM_TASKS": "1"}),
        ("Open MPI", {**TOLD["torchrun"], **OMPI_1}),
        # Variables of another MPI's launcher are no proof for this one.
        ("Open MPI", {**TOLD["srun"], **HYDRA_1}),
        # A step in a shell whose PMI_SIZE it has inherited.
        ("MPICH", {**TOLD["srun"], "PMI_SIZE": "1", "PMI_RANK": "0"}),
    ],
)
def test_an_outer_launcher_of_one_process_is_no_excuse(vendor, told):
    assert excess(1, vendor, told) is not None


def test_the_sentence_names_variable_library_way_out_and_switch():
    with pytest.raises(LaunchError) as told:
        check_launch(1, TOLD["torchrun"])
    text = str(told.value)
    assert text.startswith("this process is rank 0 of 1, but WORLD_SIZE=4: torchrun and this MPI (")
    assert text.count("; ") == 1  # the doctor's line ends there, and its cure begins
    assert "-n 4' in its place, as torchrun starts no MPI" in text
    assert text.endswith("or set COLLECTIVES_ALONE=1 if it is to work alone")
    with pytest.raises(LaunchError, match="MPI has 2 ranks, but SLURM_STEP_NUM_TASKS=4: srun"):
        check_launch(2, TOLD["srun"])


def test_the_switch_lets_processes_work_alone():
    check_launch(1, {**TOLD["srun"], "COLLECTIVES_ALONE": "1"})
    with pytest.raises(LaunchError):
        check_launch(1, {**TOLD["srun"], "COLLECTIVES_ALONE": "0"})
    with pytest.raises(ValueError, match="COLLECTIVES_ALONE='please' is neither on"):
        check_launch(1, {**TOLD["srun"], "COLLECTIVES_ALONE": "please"})


def test_variables_of_launchers_have_the_beginnings_that_a_job_of_its_own_must_not_inherit():
    for launcher in LAUNCHERS:
        for name in (launcher.mark, *launcher.sizes, launcher.rank):
            assert name.startswith((*PREFIXES, "RANK", "WORLD_SIZE")) or not name
