"""The choice of an algorithm, the tables that it goes by, and what they become for Open MPI."""

import os
import subprocess
import sys

import msgspec
import pytest
from msgspec.structs import replace

from benchmarks import openmpi_rules
from collectives.algorithms import names
from collectives.calls.choice import NEVER, ORDINARY, SHARED, Entry, Rule, Situation, Table, choose
from collectives.calls.tables import DEFAULT, load, source, users
from collectives.contracts import CONTRACTS, contract
from collectives.errors import CollectiveError


def entry(memory, ranks, per_node, *told, collective="allreduce"):
    return Entry("Open MPI", collective, memory, ranks, per_node, [Rule(*rule) for rule in told])


TABLE = Table(1, {}, 1.0, 10.0, [
    entry("numpy", 2, 2, (0, "native", 1.0), (8192, "butterfly", 1.8)),
    entry("numpy", 8, 8, (0, "native", 1.0), (1 << 20, "ring", 1.5)),
    entry("numpy", 32, 8, (0, "hierarchical:local=8", 2.0)),
    entry("shared", 2, 2, (0, "native", 1.0), (4096, "direct", 6.0)),
])  # fmt: skip


def chosen(nbytes, size, per_node=None, **constraints):
    ranks = size, per_node or size
    return choose(TABLE, Situation("Open MPI", "allreduce", nbytes, *ranks, **constraints))


def test_by_size_and_ranks():
    assert chosen(8, 2).algorithm == "native"
    assert chosen(8192, 2).algorithm == "butterfly"
    assert chosen(8192, 3).algorithm == "native"  # with as many more messages
    assert chosen(2 * 8192, 3).algorithm == "direct"  # a butterfly of three ranks sends more
    assert chosen(8192, 6).algorithm == "native"
    assert chosen(2 << 20, 16).algorithm == "ring"
    why = "4096 bytes in shared memory, 2 ranks: 6.0x native in the table for 2 ranks"
    assert chosen(4096, 2, memory="shared") == ("direct", why)


def test_what_follows_the_nodes_needs_all_of_them_alike():
    assert chosen(1 << 20, 16, 8).algorithm == "hierarchical:local=8"
    assert chosen(1 << 20, 16, 8, even=False).algorithm == "native"
    assert chosen(1 << 20, 16, 4).algorithm == "native"


@pytest.mark.parametrize(
    ("situation", "why"),
    [
        (("Open MPI", "allreduce", 8, 16, 8),
         "the table has no allreduce of ordinary arrays with Open MPI on about 16 ranks of several "
         "nodes; mpitrain submit --nodes 2 --ranks-per-node 8 -m collectives tune measures it"),
        (("MPICH", "allreduce", 8, 2, 2),
         "the table has no allreduce of ordinary arrays with MPICH on about 2 ranks of one node"),
        (("Open MPI", "scan", 8, 2, 2),
         "the table has no scan of ordinary arrays with Open MPI on about 2 ranks of one node; "
         "mpirun -n 2 python -m collectives tune measures it"),
        (("Open MPI", "barrier", 0, 2, 2), "barriers are not measured"),
        (("Open MPI", "allreduce", 8, 1, 1), "a rank alone"),
        (("Open MPI", "allreduce", 8, 8, 8), "the table for 8 ranks has none for so few bytes"),
        (("Open MPI", "allreduce", 1 << 20, 8, 8, False),
         "ring, fastest in the table for 8 ranks, cannot serve it"),
    ],
)  # fmt: skip
def test_native_says_why_the_table_chose_nothing(situation, why):
    few = entry("numpy", 8, 8, (16, "ring", 1.5))
    choice = choose(Table(1, {}, 1.0, 10.0, [few, TABLE.entries[0]]), Situation(*situation))
    assert choice.algorithm == "native" and why in choice.reason


def test_what_cannot_be_is_not_chosen():
    assert chosen(1 << 20, 8, commutes=False, native=False).algorithm == "butterfly"
    assert chosen(8, 2, native=False).reason == "this MPI has no such datatype, count or arithmetic"


@pytest.mark.parametrize(
    ("algorithm", "measured", "here", "others"),
    [("parameter_server:servers=4,segments=auto", 4, 8, 2), ("spanning_trees:links=dgx1", 8, 8, 4)],
)
def test_what_is_not_for_so_many_ranks_is_not_chosen(algorithm, measured, here, others):
    rules = (0, "native", 1.0), (4096, algorithm, 2.0)
    table = Table(1, {}, 1.0, 10.0, [entry("numpy", measured, 1, *rules)])
    call = Situation("Open MPI", "allreduce", 1 << 20, here, 1)
    assert choose(table, call).algorithm == algorithm
    chosen, reason = choose(table, call._replace(size=others))
    told = f"{algorithm}, fastest in the table for {measured} ranks, cannot serve it"
    assert chosen == "native" and reason.endswith(told)


@pytest.mark.parametrize("collective", CONTRACTS)
def test_every_call_gets_an_algorithm_that_can_serve_it(collective):
    table = load(DEFAULT)
    reduces = contract(collective).reduces
    for nbytes in (0, 8, 1 << 14, 1 << 24):
        for size in (1, 2, 3, 8):
            for bits in range(16):
                commutes, native, uneven, far = (bool(bits >> k & 1) for k in range(4))
                memory = "shared" if far else "cupy" if bits % 3 else "numpy"
                uneven = uneven and contract(collective).block is not None
                given = (commutes or not reduces, native, uneven, memory)
                call = Situation("MPICH", collective, nbytes, size, size, *given)
                algorithm = choose(table, call).algorithm
                assert call.allows(algorithm)
                assert algorithm.split(":")[0] in ("native", *names(collective))


@pytest.mark.parametrize(
    ("mpi", "ranks", "ordinary", "shared"),
    [
        ("Open MPI", 2, 8192, 4096),
        ("Open MPI", 8, 1 << 20, 4096),
        ("Open MPI", 16, 2 << 20, 2 << 20),  # eight times the ranks of the shared memory's
        ("Open MPI", 64, NEVER, NEVER),
        ("MPICH", 2, NEVER, 4096),
    ],
)
def test_native_below(mpi, ranks, ordinary, shared):
    def below(memories):
        return TABLE.native_below(Situation(mpi, "allreduce", 0, ranks, ranks), memories)

    assert (below(ORDINARY), below(SHARED)) == (ordinary, shared)


def test_the_users_table_comes_before_the_built_in_one(tmp_path, monkeypatch):
    """It has the built-in rules of what it does not tell of."""
    monkeypatch.delenv("COLLECTIVES_TUNING", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "alps")
    several = Situation("Open MPI", "allreduce", 1 << 20, 16, 8)
    assert (source(), choose(load(), several).algorithm) == (DEFAULT, "native")
    users().parent.mkdir()
    users().write_bytes(msgspec.json.encode(Table(1, {}, 1.0, 10.0, TABLE.entries[2:3])))
    assert source() == users() == tmp_path / "collectives/tuned-alps.json"
    assert choose(load(), several).reason.endswith("native in the table for 32 ranks")
    one_node = several._replace(size=2, per_node=2)
    assert choose(load(), one_node) == choose(load(DEFAULT), one_node)
    many = Table(1, {}, 1.0, 10.0, [entry("numpy", 16, 16, (0, "native", 1.0))])
    users().write_bytes(msgspec.json.encode(many))
    assert choose(load(), one_node) == choose(load(DEFAULT), one_node)
    near = choose(load(), several._replace(size=4, per_node=4))
    assert near.reason.endswith("in the table for 16 ranks")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (b"{", "Input data was truncated"),
        (b'{"version": 1}', "missing required field `environment`"),
        (("ring", "rign"), "no allreduce algorithm 'rign'; did you mean 'ring'"),
        (("ring", "ring:segmnts=4"), "ring has no option 'segmnts'; did you mean 'segments'"),
        (("ring", "auto"), "a rule names the algorithm that auto takes"),
        (('"allreduce"', '"allredcue"'), "no collective 'allredcue'"),
        (('"version":1', '"version":999'), "it is of version 999, and this program reads versi"),
        (('"alpha_us":1.0', '"alpha_us":0'), r"Expected `float` > 0.0 - at `\$.alpha_us`"),
        (b'{"version": 1, "environment": {"x": ' + b"[" * 200_000, "nested too deeply"),
        (('"ranks_per_node":2', '"ranks_per_node":3'), "ranks_per_node = 3 of ranks = 2"),
        (('"numpy"', '"disk"'), r"Invalid enum value 'disk' - at `\$.entries\[0\].memory`"),
        (('"from_bytes":0', '"from_bytes":9000'), "8192 comes after 9000"),
    ],
)
def test_tables_that_are_no_tables(tmp_path, change, sentence):
    path = tmp_path / "t.json"
    if isinstance(change, tuple):
        change = msgspec.json.encode(TABLE).decode().replace(*change).encode()
    path.write_bytes(change)
    with pytest.raises(CollectiveError, match=sentence) as raised:
        load(path)
    assert str(path) in str(raised.value)


def test_a_table_is_an_ordinary_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero", tmp_path):
        with pytest.raises(CollectiveError, match="not an ordinary file"):
            load(path)


@pytest.mark.parametrize(
    ("mpi", "nbytes", "ranks", "per_node", "algorithm"),
    [
        ("Open MPI", 256 << 10, 2, 1, "ring"),
        ("Open MPI", 128 << 10, 2, 1, "native"),
        ("Open MPI", 1 << 20, 4, 1, "native"),  # its recursive halving
        ("Open MPI", 16 << 20, 16, 8, "ring"),
        ("Open MPI", 16 << 20, 2, 2, "direct"),  # through slots
        ("MPICH", 16 << 20, 2, 1, "native"),
    ],
)
def test_open_mpis_reduce_scatter_between_hosts(mpi, nbytes, ranks, per_node, algorithm):
    """It reduces large blocks to rank 0, which scatters them: twice the bytes, and in a row."""
    call = Situation(mpi, "reduce_scatter", nbytes, ranks, per_node)
    assert choose(load(DEFAULT), call).algorithm == algorithm


def test_rules_for_open_mpi(tmp_path, capsys):
    """On one node, where messages are no messages of MPI, and of another library there are none."""
    wanted = """2 # collectives
2 # allreduce
1 # numbers of ranks
32 # ranks
1 # sizes
0 4 0 0 # hierarchical:local=8,segments=16
7 # broadcast
1 # numbers of ranks
32 # ranks
3 # sizes
0 3 0 1024 # chain:segments=8
65536 3 0 8192 # chain:segments=8
131072 6 0 0 # binomial_tree
"""
    told = (0, "chain:segments=8", 2.0), (1 << 16, "chain:segments=8", 3.0)
    trees = entry("numpy", 32, 8, *told, (1 << 17, "binomial_tree", 2.0), collective="broadcast")
    nodes = entry("numpy", 32, 8, (0, "hierarchical:local=8,segments=16", 2.0))
    table = replace(TABLE, entries=[*TABLE.entries[:2], nodes, trees])
    others = [replace(one, mpi="MPICH", ranks=64) for one in TABLE.entries]
    assert openmpi_rules.rules_file(replace(table, entries=table.entries + others)) == wanted
    path = tmp_path / "t.json"
    path.write_bytes(msgspec.json.encode(table))
    assert openmpi_rules.main([str(path)]) == 0
    assert capsys.readouterr().out == wanted
    assert openmpi_rules.main([]) == 2
    assert "no entry for ordinary memory on several nodes" in capsys.readouterr().err


def test_threads_load_their_first_table_at_once():
    """Several times anew, as msgspec crashed in most of such races."""
    program = """
import importlib, sys, threading
from collectives.calls import choice, tables
sys.setswitchinterval(1e-6)
for _ in range(20):
    importlib.reload(choice)
    importlib.reload(tables)
    start = threading.Barrier(4)
    threads = [threading.Thread(target=lambda: (start.wait(), tables.load())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
