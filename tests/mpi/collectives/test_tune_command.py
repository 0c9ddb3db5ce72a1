"""``python -m collectives tune``, by real ranks."""

import pytest

from collectives.__main__ import main
from collectives.calls.tables import load


def test_a_rank_alone_has_nothing_to_measure(comm, tmp_path, capsys):
    if comm.size > 1:
        pytest.skip("there is more than one rank")
    assert main(["tune", "-o", f"{tmp_path}/tuned.json"]) == 2
    assert "start it as mpirun -n 4 python -m collectives tune" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.quick_on(2, 3)
@pytest.mark.mpi(min_size=2)
def test_a_table_is_measured_and_merged(comm, folder, capsys):
    path = folder / "tuned.json"
    quick = ["-b", "8", "-e", "8", "--repeats", "1", "-o", str(path)]
    for collective, passes in (("allreduce", "2"), ("broadcast", "1"), ("allreduce", "1")):
        assert main(["tune", collective, *quick, "--passes", passes]) == 0
    comm.Barrier()
    table = load(path)
    kinds = [(e.collective, e.memory, e.ranks, e.ranks_per_node) for e in table.entries]
    size = comm.size
    assert sorted(kinds) == [
        (c, m, size, size) for c in ("allreduce", "broadcast") for m in ("numpy", "shared")
    ]
    assert all(entry.rules and entry.rules[0].from_bytes == 0 for entry in table.entries)
    told = capsys.readouterr().out
    if comm.rank == 0:
        assert "pass 2 of 2: allreduce, shared" in told and "COLLECTIVES_TUNING=" in told
        assert table.environment["ranks"] == size


def test_a_file_that_is_no_table(comm, folder, capsys):
    """It is found before anything is measured, and stays."""
    path = folder / "tuned.json"
    if comm.rank == 0:
        path.write_text("precious")
    comm.Barrier()
    assert main(["tune", "-o", str(path)]) == 2
    assert path.read_text() == "precious"
    assert main(["tune", "-o", f"{path}/tuned.json"]) == 2
    told = capsys.readouterr().err
    assert comm.rank or ("it is left as it was" in told and "cannot write" in told)
