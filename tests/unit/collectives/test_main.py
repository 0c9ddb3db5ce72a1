"""The commands that need no MPI, as a user types them."""

import json

import pytest

from collectives.__main__ import main


def test_list(capsys):
    assert main(["list", "allreduce", "-n", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (ring,) = [line for line in lines if line.startswith("allreduce  ring ")]
    assert ring.split()[2:4] == ["30", "1.88"]


def test_verify(capsys):
    assert main(["verify", "allgather", "--ranks", "1-5,8"]) == 0
    assert "schedules proved" in capsys.readouterr().out
    assert main(["verify", "--algorithm", "parameter_server:servers=2", "--ranks", "2-6"]) == 0
    assert "5 schedules proved" in capsys.readouterr().out


def test_mutations(capsys):
    assert main(["verify", "--mutations", "--algorithm", "butterfly", "--ranks", "2,4"]) == 0
    assert capsys.readouterr().out.splitlines()[-2].split() == ["total", "68", "68", "0", "0"]


def test_draw(capsys, tmp_path):
    picture = tmp_path / "ring.png"
    assert main(["draw", "ring", "-n", "3", "-o", str(picture)]) == 0
    assert "round 3" in capsys.readouterr().out
    assert picture.stat().st_size > 1000


def test_compare(capsys, tmp_path):
    rows = [
        {"memory": "numpy", "algorithm": name, "bytes": 1024, "p50_us": us, "in_place": False}
        for name, us in (("ring", 2.0), ("native", 3.0))
    ]
    told = {"environment": {"mpi": "Some MPI 1.0", "threads": "single"}, "results": rows}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(told))
    assert main(["compare", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| bytes | Some MPI 1.0, single: native (us) | ring |",
        "| ---: | ---: | ---: |",
        "| 1 KiB | 3.0 | 1.50x |",
    ]
    path.write_text("[]")
    assert main(["compare", str(path)]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["draw", "rign"], "did you mean 'ring'?"),
        (["verify", "--algorithm", "rign"], "did you mean 'ring'?"),
        (["draw", "ring", "-n", "99"], "at most 32 ranks"),
    ],
)
def test_mistakes_are_one_sentence(capsys, arguments, sentence):
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1


def test_ranks_that_cannot_be_read(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["verify", "--ranks", "1-x"])
    assert stop.value.code == 2
    assert "write e.g. 1-33,64" in capsys.readouterr().err
