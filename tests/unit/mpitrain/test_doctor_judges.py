"""Findings of the doctor on machines that these tests do not run on."""

from mpi4py import MPI

from mpitrain.doctor import Status
from mpitrain.doctor.finding import runs_of
from mpitrain.doctor.memory import Shared, judge_node_memory, judge_windows
from mpitrain.doctor.network import (
    Links,
    judge_clocks,
    judge_gpus,
    judge_messages,
    judge_network,
    judge_tuning,
    links,
)
from mpitrain.doctor.placement import Cores, Place, judge_cores, judge_ranks, visible_gpus
from mpitrain.doctor.slingshot import Fabric, fabric, judge_slingshot
from mpitrain.doctor.software import judge_library, judge_packages, judge_threads, mpi_libraries
from mpitrain.doctor.storage import judge_checkpoints

HDR = Links(("mlx5_0 (4: ACTIVE, 200 Gb/sec)",), ("ib0",), ("UCX_TLS=rc",))


def status(finding):
    assert bool(finding.fix) == (finding.status is not Status.OK)
    return finding.status


def test_software():
    assert status(judge_packages(["numpy 1", "numpy 1"])) is Status.OK
    assert status(judge_packages(["numpy 1", "numpy 2"])) is Status.FAIL
    maps = [
        "7f0 r--p 000 08:01 1 /opt/a/lib/libmpi.so.40",
        "7f1 r-xp 000 08:01 1 /opt/a/lib/libmpi.so.40",
        "7f2 r-xp 000 08:01 2 /opt/b/lib/libmpich.so.12.1",
        "7f3 r-xp 000 08:01 3 /opt/b/lib/libmpifort.so.40",
        "7f4 rw-p 000 00:00 0",
    ]
    both = mpi_libraries(maps)
    assert both == ["/opt/a/lib/libmpi.so.40", "/opt/b/lib/libmpich.so.12.1"]
    assert status(judge_library([("Open MPI 5", both[:1])] * 2)) is Status.OK
    two = judge_library([("Open MPI 5", both)])
    assert status(two) is Status.WARN
    assert "libmpi.so.40 and /opt/b" in two.text
    assert status(judge_library([("Open MPI 5", []), ("MPICH 4", [])])) is Status.FAIL
    assert status(judge_threads([MPI.THREAD_MULTIPLE, MPI.THREAD_SINGLE])) is Status.WARN


def test_ranks_and_their_gpus():
    assert runs_of([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    even = judge_ranks([Place(0, "a", 2)] * 2 + [Place(2, "b", 2)] * 2)
    assert (status(even), even.text) == (Status.OK, "a: ranks 0-1, 2 GPUs; b: ranks 2-3, 2 GPUs")
    uneven = judge_ranks([Place(0, "a", 0), Place(0, "a", 0), Place(2, "b", 0)])
    assert status(uneven) is Status.WARN
    assert "--ntasks-per-node" in uneven.fix
    assert status(judge_ranks([Place(0, "a", 1), Place(1, "b", 0)])) is Status.WARN
    many = judge_ranks([Place(n, f"n{n}", 0) for n in range(20)])
    assert many.text.endswith("; and 12 more nodes")


def test_gpus_that_a_process_may_open(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert visible_gpus({}, str(tmp_path)) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, str(tmp_path)) == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, str(tmp_path)) == 0


def test_gpus_of_amd_and_intel(tmp_path):
    (tmp_path / "dri").mkdir()
    for number in range(4):
        (tmp_path / "dri" / f"renderD{128 + number}").touch()
    folder = str(tmp_path)
    assert visible_gpus({}, folder) == 0  # a notebook's graphics
    assert visible_gpus({"ZE_AFFINITY_MASK": "0.0,0.1"}, folder) == 2
    (tmp_path / "kfd").touch()
    assert visible_gpus({"ZE_AFFINITY_MASK": "0"}, folder) == 4
    assert visible_gpus({"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0,1"}, folder) == 1
    assert visible_gpus({"HIP_VISIBLE_DEVICES": ""}, folder) == 0


def test_a_gpu_that_the_launcher_gives_each_rank():
    """As ``--gpus-per-task=1 --gpu-bind=closest`` does: all see device 0, another one each."""
    own = judge_ranks([Place(0, "a", 1, True)] * 4)
    assert (status(own), own.text) == (Status.OK, "a: ranks 0-3, 1 GPU each")
    assert judge_ranks([Place(0, "a", 1)] * 2).text == "a: ranks 0-1, 1 GPU"
    assert judge_ranks([Place(0, "a", 4, True)] * 2).text == "a: ranks 0-1, 4 GPUs"


def test_what_a_rank_finds_of_slingshot(tmp_path):
    assert fabric(tmp_path, {"HOME": "/"}, "MPICH 4", "") == Fabric()
    for name in ("net/hsn1", "net/hsn0", "net/eth0"):
        (tmp_path / name).mkdir(parents=True)
    assert fabric(tmp_path, {}, "", "").adapters == ("hsn0", "hsn1")
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert fabric(tmp_path, {}, "", "").adapters == ()  # Slingshot 10, which is no cxi
    (tmp_path / "cxi" / "cxi0").mkdir(parents=True)
    maps = "7f0 r-xp 0 08:01 1 /opt/cray/lib64/libcxi.so.1\n7f1 r 0 0 1 /a/libmpi_gtl_hsa.so.0\n"
    given = {"MPICH_GPU_SUPPORT_ENABLED": "1", "HOME": "/"}
    found = fabric(tmp_path, given, "MPI VERSION    : CRAY MPICH version 8.1.30", maps)
    assert found == Fabric(("cxi0",), True, True, True, found.gpus, dict([*given.items()][:1]))


def test_slingshot():
    none = judge_slingshot([Fabric()])
    assert (status(none), none.text) == (Status.OK, "none")
    cray = Fabric(("cxi0",), cray=True)
    assert judge_slingshot([cray]).text == "cxi0, by Cray MPICH"
    assert judge_slingshot([Fabric(("cxi0",), cxi=True)]).text == "cxi0, by libcxi"
    tcp = judge_slingshot([cray, Fabric(("cxi0", "cxi1"))])
    assert status(tcp) is Status.FAIL and "rank 1 has cxi0 cxi1, but its MPI has not" in tcp.text
    ucx = judge_slingshot([Fabric(("hsn0",), variables={"OMPI_MCA_pml": "ucx"})])
    assert status(ucx) is Status.FAIL and "UCX knows no Slingshot" in ucx.text
    on, off = ({"MPICH_GPU_SUPPORT_ENABLED": value} for value in "10")
    assert status(judge_slingshot([cray._replace(variables=on)])) is Status.FAIL
    assert status(judge_slingshot([cray._replace(variables=on, gtl=True, gpus=1)])) is Status.OK
    assert status(judge_slingshot([cray._replace(variables=off, gpus=1)])) is Status.WARN
    assert status(judge_slingshot([cray._replace(gpus=1)])) is Status.WARN
    assert status(judge_slingshot([cray._replace(variables=off)])) is Status.OK
    assert status(judge_slingshot([Fabric(variables=on)])) is Status.OK  # another MPI


def test_cores_that_have_to_serve_two():
    def of(affinity, threads=1):
        return Cores(0, "a", frozenset(affinity), threads)

    assert status(judge_cores([of({0}), of({1})])) is Status.OK
    same = judge_cores([of({0}), of({0}), of({0, 1, 2, 3})])
    assert (status(same), same.text) == (Status.WARN, "2 ranks on the 1 core 0 of a")
    assert status(judge_cores([of(range(2))] * 4)) is Status.WARN
    threads = judge_cores([of(range(4), 4)] * 2)
    assert status(threads) is Status.WARN
    assert "OMP_NUM_THREADS" in threads.fix


def test_memory():
    assert status(judge_node_memory([Shared(True, "")])) is Status.OK
    assert status(judge_node_memory([Shared(True, "no memfd")])) is Status.WARN
    assert status(judge_node_memory([Shared(True, ""), Shared(False, "")])) is Status.FAIL
    assert status(judge_windows([(True, 1 << 30)])) is Status.OK
    assert status(judge_windows([(True, 1 << 20)])) is Status.WARN
    assert status(judge_windows([(False, 1 << 30)])) is Status.FAIL


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


def test_networks():
    assert status(judge_network([HDR, HDR])) is Status.OK
    other = judge_network([HDR, HDR._replace(variables=("UCX_TLS=tcp",))])
    assert status(other) is Status.WARN
    assert "ranks 0 and 1 have different transport variables: UCX_TLS=rc UCX_TLS=tcp" in other.text
    assert status(judge_network([HDR, HDR._replace(infiniband=())])) is Status.WARN
    down = HDR._replace(infiniband=("mlx5_0 (1: DOWN, 10 Gb/sec)",))
    assert status(judge_network([HDR, down])) is Status.WARN


def test_gpu_transfers():
    assert judge_gpus([None, None]).text == "no GPU"
    assert status(judge_gpus([(True, "arrived"), None])) is Status.OK
    failed = judge_gpus([None, (False, "Segmentation fault")])
    assert status(failed) is Status.WARN
    assert "rank 1: Segmentation fault" in failed.text


def test_messages_clocks_and_tuning():
    assert status(judge_messages([(1e-6, 1e-3), (2e-6, 1e-3)])) is Status.OK
    assert status(judge_messages([(5e-3, 1e-3), (5e-3, 1e-3)])) is Status.WARN
    assert status(judge_messages([(1e-6, 1.0), (1e-6, 1.0)])) is Status.WARN
    assert status(judge_clocks([0.0, 1e-4, -1e-4])) is Status.OK
    apart = judge_clocks([0.0, 0.1, -3.0])
    assert status(apart) is Status.WARN
    assert apart.text == "3.10 s apart; rank 2's is furthest from rank 0's"
    assert status(judge_tuning([(True, "1.8x native, measured on 2")] * 2)) is Status.OK
    found = judge_tuning([(False, "allreduce was not measured; tune measures it")] * 2)
    assert found.fix.endswith("mpirun -n 2 python -m collectives tune -o tuned.json")
    assert (status(found), found.text) == (Status.WARN, "auto: allreduce was not measured")
    assert status(judge_tuning([(False, "a rank alone")])) is Status.OK


def test_checkpoint_folders(tmp_path):
    assert status(judge_checkpoints(tmp_path, [(True, 1 << 40), (True, 0)])) is Status.OK
    assert status(judge_checkpoints(tmp_path, [(True, 1 << 20)])) is Status.WARN
    blind = judge_checkpoints(tmp_path, [(True, 1 << 40), (False, 0), (False, 0)])
    assert status(blind) is Status.FAIL
    assert "ranks 1-2 do not see" in blind.text
