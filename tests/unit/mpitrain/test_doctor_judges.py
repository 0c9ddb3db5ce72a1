"""Findings of the doctor on machines that these tests do not run on."""

from functools import partial
from pathlib import Path

import pytest
from mpi4py import MPI

from mpitrain.device.choice import RankGPUs
from mpitrain.doctor import Status
from mpitrain.doctor.devices import judge_devices
from mpitrain.doctor.finding import runs_of
from mpitrain.doctor.memory import Shared, judge_node_memory
from mpitrain.doctor.network import (
    Links,
    judge_gpus,
    judge_messages,
    judge_network,
    judge_tuning,
    links,
)
from mpitrain.doctor.placement import Cores, Place, judge_cores, judge_ranks
from mpitrain.doctor.software import judge_library, judge_packages, judge_threads, mpi_libraries
from mpitrain.doctor.storage import judge_checkpoints

HDR = Links(("mlx5_0 (4: ACTIVE, 200 Gb/sec)",), ("ib0",), ("UCX_TLS=rc",))
OK, WARN, FAIL = Status.OK, Status.WARN, Status.FAIL


def cores_of(affinity, threads=1):
    return Cores(0, "a", frozenset(affinity), threads)


@pytest.mark.parametrize(
    ("judge", "found", "expected", "text"),
    [
        (judge_packages, ["numpy 1", "numpy 1"], OK, ""),
        (judge_packages, ["numpy 1", "numpy 2"], FAIL, ""),
        (judge_library, [("Open MPI 5", ["/a/libmpi.so"])] * 2, OK, ""),
        (judge_library, [("A 5", ["/a/x.so", "/b/y.so"])], WARN, "/a/x.so and /b/y.so"),
        (judge_library, [("Open MPI 5", []), ("MPICH 4", [])], FAIL, ""),
        (judge_threads, [MPI.THREAD_MULTIPLE, MPI.THREAD_SINGLE], WARN, ""),
        (judge_ranks, [Place(0, "a")] * 2 + [Place(2, "b")] * 2, OK, "a: ranks 0-1; b: ranks 2-3"),
        (judge_ranks, [Place(0, "a")] + [Place(1, "b")] * 2, WARN, "a: rank 0; b: ranks 1-2"),
        (judge_ranks, [Place(n, f"n{n}") for n in range(20)], OK, "; and 12 more nodes"),
        (judge_network, [HDR._replace(xpmem=True)], OK, "broadcasts: try MPICH_SMP_SINGLE_COPY"),
        (judge_cores, [cores_of({0}), cores_of({1})], OK, ""),
        (judge_cores, [cores_of({0}), cores_of({0}), cores_of({0, 1, 2, 3})], WARN,
         "2 ranks on the 1 core 0 of a"),
        (judge_cores, [cores_of(range(2))] * 4, WARN, ""),
        (judge_cores, [cores_of(range(4), 4)] * 2, WARN, "2 ranks of 4 BLAS threads"),
        (judge_node_memory, [Shared(True, "", 1 << 30)], OK, "/dev/shm has 1024 MiB free"),
        (judge_node_memory, [Shared(True, "", 1 << 20)], WARN, "/dev/shm has 1 MiB free"),
        (judge_node_memory, [Shared(True, "no memfd", 1 << 30)], WARN, "no memfd"),
        (judge_node_memory, [Shared(True, "", 1 << 30), Shared(False, "", 1 << 30)], FAIL, ""),
        (judge_network, [HDR, HDR], OK, ""),
        (judge_network, [HDR, HDR._replace(variables=("UCX_TLS=tcp",))], WARN,
         "ranks 0 and 1 have different transport variables: UCX_TLS=rc UCX_TLS=tcp"),
        (judge_network, [HDR, HDR._replace(infiniband=())], WARN, ""),
        (judge_network, [HDR, HDR._replace(infiniband=("mlx5_0 (1: DOWN, 10 Gb/sec)",))], WARN,
         "rank 1: mlx5_0 (1: DOWN"),
        (judge_tuning, ["a", "a"], OK, "auto goes by "),
        (judge_tuning, ["a", "a", "b", "b"], WARN, " has no rule for 4 ranks of several nodes"),
        (judge_gpus, [None, None], OK, "no GPU"),
        (judge_gpus, [(True, "arrived"), None], OK, ""),
        (judge_gpus, [None, (False, "Segmentation fault")], WARN, "rank 1: Segmentation fault"),
        (judge_devices, [RankGPUs("", n, f"gpu {n}") for n in range(2)], OK, "of its own for each"),
        (judge_devices, [RankGPUs("no GPU")] * 2, OK, "cpu; no rank has a GPU"),
        (judge_devices, [RankGPUs("", n // 2, f"gpu {n // 2}") for n in range(3)], WARN,
         "3 ranks share 2 GPUs"),
        (judge_devices, [RankGPUs("", 0, "gpu 0"), RankGPUs("no GPU")], WARN, "rank 1: no GPU"),
        (judge_messages, [(1e-6, 1e-3), (2e-6, 1e-3)], OK, ""),
        (judge_messages, [(5e-3, 1e-3), (5e-3, 1e-3)], WARN, ""),
        (judge_messages, [(1e-6, 1.0), (1e-6, 1.0)], WARN, ""),
        (partial(judge_checkpoints, Path("runs")), [(True, 1 << 40), (True, 0)], OK, ""),
        (partial(judge_checkpoints, Path("runs")), [(True, 1 << 20)], WARN, ""),
        (partial(judge_checkpoints, Path("runs")), [(True, 1 << 40), (False, 0), (False, 0)], FAIL,
         "ranks 1-2 do not see"),
    ],
)  # fmt: skip
def test_a_finding_has_its_status_and_a_fix_unless_all_is_well(judge, found, expected, text):
    finding = judge(found)
    assert finding.status is expected and text in finding.text
    assert bool(finding.fix) == (expected is not OK)


def test_numbers_in_short_and_the_libraries_of_a_process():
    assert runs_of([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    maps = [
        "7f0 r--p 000 08:01 1 /opt/a/lib/libmpi.so.40",
        "7f1 r-xp 000 08:01 1 /opt/a/lib/libmpi.so.40",
        "7f2 r-xp 000 08:01 2 /opt/b c/lib/libmpich.so.12.1",
        "7f3 r-xp 000 08:01 3 /opt/b/lib/libmpifort.so.40",
        "7f4 rw-p 000 00:00 0",
    ]
    assert mpi_libraries(maps) == ["/opt/a/lib/libmpi.so.40", "/opt/b c/lib/libmpich.so.12.1"]


def test_a_node_with_infiniband(tmp_path):
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    for name, state in (("ib0", "up"), ("eth1", "down"), ("lo", "unknown")):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "operstate").write_text(f"{state}\n")
    found = links(tmp_path, {"UCX_TLS": "rc", "HOME": "/", "OMPI_MCA_pml": "ucx"})
    assert found.infiniband == ("mlx5_0 (4: ACTIVE, 200 Gb/sec (4X HDR))",)
    assert found.ethernet == ("ib0",)
    assert found.variables == ("OMPI_MCA_pml=ucx", "UCX_TLS=rc")
    assert links(tmp_path / "nothing", {}) == Links((), (), ())
