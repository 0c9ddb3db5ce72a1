"""The commands that need no MPI, as a user types them."""

import json
from argparse import Namespace

import pytest

from collectives.__main__ import main
from collectives.commands.arguments import drawn

RECORD = {
    "collective": "allreduce", "algorithm": "auto", "ran": "ring", "memory": "numpy", "bytes": 8,
    "in_place": False, "p50_us": 1.0, "ranks": 2,
}  # fmt: skip


def told(**change):
    return {"environment": {"mpi": "A", "threads": "single"}, "results": [RECORD | change]}


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"environment": {}, "results": []}, "Object missing required field `mpi`"),
        (told(p50_us=0), "Expected `float` > 0.0 - at `$.results[0].p50_us`"),
        (told(ran=""), "a row of ours needs `ran` and `ranks`"),
        (told(ranks=0), "a row of ours needs `ran` and `ranks`"),
        (told(ranks=-1), "Expected `int` >= 0"),
        (told(ranks=10**30), "Expected `int` <= 1048576"),
        (told(ranks=64), "allreduce ring on 64 ranks has more than 5000 steps, too many to count"),
    ],
)
def test_fit_refuses_what_is_no_benchmark_or_too_large(
    capsys, tmp_path, monkeypatch, told, sentence
):
    monkeypatch.setattr("collectives.compile.cost._MOST_STEPS", 5000)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(told))
    assert main(["fit", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("collectives: ") and error.count("\n") == 1 and sentence in error
    is_read = "too many" in sentence
    assert (f"cannot read {path} as what 'bench -J' writes: " in error) == (not is_read)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["draw", "rign"], "did you mean 'ring'?"),
        (["draw", "allreduce", "ring", "-n", "99"], "at most 32 ranks"),
        (["draw", "allreduce", "ring", "-n", "2000", "--text"], "at most 128 ranks, not 2000"),
        (["draw", "allreduce", "ring", "-n", "3", "-o", "/nowhere/ring.png"],
         "cannot write /nowhere/ring.png: it is a folder, or its folder does not exist\n"),
        (["draw", "-n", "3"], "name one algorithm, as in allreduce ring"),
        (["explore", "ring", "--algorithm", "swing"], "no collective 'ring'"),
        (["explore", "allreduce", "ring", "-n", "65"], "at most 64 ranks, not 65"),
        (["explore", "bcast", "chain", "--root", "8"], "root 8 must lie in 0..7"),
        (["explore", "ring", "--root", "1"], "allreduce has no root"),
        (["explore", "alltoall", "pairwise", "--in-place"], "copied aside first"),
        (["simulate", "-n", "8", "--algorithm", ""], "--algorithm names none"),
        (["simulate", "-n", "8", "--plot", "x.nope"], "cannot draw into x.nope: name a file"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_and_leave_no_file(
    capsys, tmp_path, monkeypatch, arguments, sentence
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("collectives: ") and sentence in told and told.count("\n") == 1
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("verify -n 1-x", "write e.g. 1-33,64 or 8..64"),
        ("verify -n 0..4", "write e.g. 1-33,64 or 8..64"),
        ("verify -n 5-2", "5-2 is empty; write 2-5"),
        ("verify -n 1-9999999999999", "is more than 1048576 ranks"),
        ("simulate -n 8..1000000000000", "is more than 1048576 ranks"),
        ("list -n 1000000000000", "is more than 1048576 ranks"),
        ("simulate -n 16..8", "16..8 is empty; write 8..16"),
        ("list -n 0", "'0' is no whole number above 0"),
        ("cost --reduction 0", "'0' is no number above 0"),
        ("simulate --alpha nan", "'nan' is no finite number from 0 on"),
        ("simulate --bandwidth 0", "'0' is no number above 0"),
        ("bench allreduce -n -3", "'-3' is no whole number above 0"),
        ("bench allreduce -w -1", "'-1' is no whole number from 0 on"),
        ("bench allreduce -T nan", "'nan' is no number above 0"),
        ("bench allreduce --peak 0GB/s", "'0GB/s' is no bandwidth; write 25GB/s"),
        ("simulate --bandwith 3",
         "simulate: error: unrecognized arguments: --bandwith; did you mean '--bandwidth'?"),
        ("verify allreduce ring", "verify: error: unrecognized arguments: ring; options are -h"),
        ("simulate --topology rings", "'rings' is no network; there are flat, "),
        ("verify ring", "'ring' is an algorithm; write --algorithm ring"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be(capsys, arguments, sentence):
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("former", "words"),
    [
        ("draw ring -c bcast --ranks 4", "draw broadcast ring -n 4"),
        ("explore ring --collective alltoall --ranks 4,8", "explore alltoall ring -n 4,8"),
        ("draw alltoall --algorithm bruck", "draw -c alltoall bruck"),
        ("explore --algorithm ring", "explore allreduce ring"),
        ("simulate --ranks 8..16 --size 4K", "simulate allreduce -n 8..16 -b 4K"),
        ("cost --size 1M", "cost allreduce -n 8 -b 1M"),
        ("verify --ranks 1-4", "verify -n 1-4"),
        ("list", "list -n 8"),
        ("tune", "tune -b 8"),
        ("bench allreduce -n 8 -b 8", "bench osu_allreduce --iters 8"),
    ],
)
def test_one_vocabulary_and_that_of_the_release_before(capsys, monkeypatch, former, words):
    """The collective is the first word, -n are ranks, -b bytes; old words are not in the help."""
    found = []

    def parse(parser, given):
        found.append(vars(parser.parse_args(given)))
        raise SystemExit(0)

    monkeypatch.setattr("collectives.commands.program.parsed", parse)
    for one in (former, words, f"{words.split()[0]} --help"):
        with pytest.raises(SystemExit) as stop:
            main(one.split())
        assert stop.value.code == 0
    for one in found:
        if "former" in one:
            one["collective"], one["algorithm"] = drawn(Namespace(**one))
            del one["former"], one["named"]
    assert found[0] == found[1]
    told = capsys.readouterr().out
    assert "collective " in told.partition("options:")[0]
    assert not any(old in told for old in ("--size", "--collective"))


def test_simulate(capsys, tmp_path):
    words = "simulate -n 4..8 -b 8M --alpha 1 --bandwidth 10 --algorithm ring,direct --plot"
    assert main([*words.split(), f"{tmp_path}/s.png"]) == 0
    assert (tmp_path / "s.png").stat().st_size > 1000
    title, _, *rows, _ = capsys.readouterr().out.splitlines()
    assert title.startswith("allreduce of 8388608 bytes, network flat, 1 us, 10 GB/s")
    for row, p in zip(rows, (4, 8), strict=True):
        ranks, ring, direct, best = row.split()
        shard = (8 << 20) / p
        seconds = (p - 1) * (2 * (1e-6 + shard / 10e9) + shard / 100e9)
        assert (int(ranks), float(ring)) == (p, pytest.approx(1e3 * seconds, abs=1e-3))
        assert {"ring": ring, "direct": direct}[best] == min(ring, direct, key=float)
