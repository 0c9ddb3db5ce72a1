"""A program's own algorithms: what may be registered, and what the commands make of a file."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from collectives import Algorithm, ScheduleError, UnknownAlgorithm, register
from collectives.__main__ import main
from collectives.algorithms import ALGORITHMS, REGISTRY, binomial_tree, build, find, names, ring
from collectives.algorithms.butterfly import recursive_doubling
from collectives.analysis import user_code
from collectives.analysis.user_code import resolve
from collectives.schedule import Buffer, Send, sendbuf

ROOT = Path(__file__).parents[3]
OWN = ROOT / "examples" / "own_algorithm.py"
INVENT = (ROOT / "docs" / "invent.md").read_text()


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_entries", dict(REGISTRY._entries))


def of_ring(name, **claims):
    return Algorithm("allreduce", name, ring.allreduce, chunks=lambda size: size, **claims)


def test_a_name_means_one_algorithm(caplog):
    first = register(of_ring("of_a_name"))
    assert "of_a_name" in names("allreduce")
    assert register(first) is first
    register(of_ring("of_a_name"))  # the same again, as a second import gives it
    assert find("allreduce", "of_a_name") is first
    assert not caplog.text

    def mended(rank, size):  # perhaps on more ranks than are proved
        yield from ring.allreduce(rank, size)

    register(replace(first, rounds=mended))
    assert "allreduce of_a_name does what the first of its name does" in caplog.text
    assert find("allreduce", "of_a_name") is first
    for other in (
        Algorithm("allreduce", "of_a_name", recursive_doubling),
        of_ring("of_a_name", uniform=True),
        of_ring("ring"),
    ):
        with pytest.raises(UnknownAlgorithm, match="there is another allreduce algorithm"):
            register(other)
    assert find("allreduce", "ring") is ALGORITHMS[0]


@pytest.mark.parametrize("name", [None, "auto", "native", "all", "a b", "", "a:b", "x.py"])
def test_names_that_cannot_be(name):
    with pytest.raises(UnknownAlgorithm, match="cannot have the name"):
        register(of_ring(name))


def never_ending(rank, size):
    while True:
        yield ()


def of_chunk(chunk):
    return lambda rank, size: iter([(Send((rank + 1) % size, chunk),)])


def to_floats(rank, size):
    for steps in recursive_doubling(rank, size):
        yield tuple(step._replace(peer=float(step.peer)) for step in steps)


@pytest.mark.parametrize(
    ("rounds", "claims", "sentence"),
    [
        (never_ending, {}, "the generator has not ended after 10000 rounds"),
        (lambda rank, size: None, {}, "'NoneType' object is not iterable"),
        (lambda rank, size: [Send(1 - rank, sendbuf[0])], {}, "is not a round: yield a tuple"),
        (lambda rank, size: [(rank, size)], {}, "is not a round: yield a tuple"),
        (to_floats, {}, "has a peer or chunk that is no whole number"),
        (of_chunk("r0"), {}, "names what is no chunk of sendbuf, recvbuf"),
        (of_chunk(Buffer("mine")[0]), {}, "names what is no chunk of sendbuf, recvbuf"),
        (of_chunk(sendbuf[-1]), {}, "names s-1, which does not exist"),
        (lambda rank, size: [(Send(1 // (size - 2), sendbuf[0]),)], {},
         "on 2 ranks: rank 0 round 0: ZeroDivisionError"),
        (ring.allreduce, {"chunks": lambda size: 0}, "chunks is 0, not a number from 1 on"),
        (ring.allreduce, {"chunks": lambda size: size / 2}, "chunks is 0.5, not a number"),
        (ring.allreduce, {"chunks": lambda size: 1 // 0}, "ZeroDivisionError"),
        (ring.allreduce, {"chunks": lambda size: 10**12}, "more than the 10000 that are proved"),
        (recursive_doubling, {"workspace": lambda size: -1}, "workspace is -1"),
        (recursive_doubling, {"workspace": lambda size: 10**12},
         "workspace is 1000000000000, more than"),
        (ring.allreduce, {"chunks": lambda size: size, "keeps_order": True},
         "says keeps_order=True, and it does not reduce in rank order"),
        (binomial_tree.allreduce, {"uniform": True}, "says uniform=True, and rank 1"),
        (recursive_doubling, {"uneven": True}, "says uneven=True"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(rounds, claims, sentence):
    with pytest.raises(ScheduleError) as caught:
        register(Algorithm("allreduce", "refused", rounds, **claims))
    assert sentence in str(caught.value)
    assert "refused" in str(caught.value)
    assert "refused" not in names("allreduce")


def none(rank, size):
    raise UnknownAlgorithm("not today")
    yield


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        (replace(find("reduce_scatter", "direct"), name="roomless", in_place=True), ScheduleError,
         "says in_place=True, and reduce_scatter in place has"),
        (Algorithm("broadcast", "a", lambda rank, size, root: binomial_tree.broadcast(rank, size)),
         ScheduleError, "broadcast a on 2 ranks"),
        (Algorithm("allreduce", "none", none), UnknownAlgorithm, "none of 2 to 9 ranks: not today"),
        (ring.allreduce, UnknownAlgorithm, "register takes an Algorithm, not a function"),
        (Algorithm("allreduce", "a", None), UnknownAlgorithm, "needs rounds, a generator"),
    ],
)  # fmt: skip
def test_what_is_no_algorithm_or_for_no_root_or_size_is_refused(given, error, sentence):
    with pytest.raises(error, match=sentence):
        register(given)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        (f"{OWN}", "both_ways"),
        (f"{OWN}:both_ways", "both_ways"),
        (f"{OWN}:both_ways:segments=4", "both_ways:segments=4"),
        (f"{OWN}:segments=4", "both_ways:segments=4"),
        ("ring:segments=2", "ring:segments=2"),
        ("no_such", "no_such"),
    ],
)
def test_what_is_asked_for(asked, name):
    assert resolve(asked) == name


def file(folder, text):
    """A file of such lines, behind what they need."""
    path = folder / "mine.py"
    path.write_text(
        "from dataclasses import replace\nfrom collectives.algorithms import ALGORITHMS\n"
        f"def like(name): return replace(ALGORITHMS[0], name=name)\n{text}\n"
    )
    return path


@pytest.mark.parametrize(
    ("text", "asked", "sentence"),
    [
        ("ring = ALGORITHMS[0]", "", "has no algorithm; give it one"),
        ("1 /", "", "cannot be imported: SyntaxError"),
        ("raise SystemExit(3)", "", "cannot be imported: SystemExit: 3"),
        ("a = like('one')\nb = like('two')", "", "has one, two; say which, as"),
        ("a = like('one')\nb = like('two')", ":tow", "has no algorithm 'tow'; did you mean 'two'"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, text, asked, sentence):
    with pytest.raises(UnknownAlgorithm, match=sentence):
        resolve(f"{file(tmp_path, text)}{asked}")


def test_a_file_may_import_its_neighbours_and_name_by_variable(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("name = 'by_variable'\n")
    path = file(tmp_path, "from neighbour_of_mine import name\nv = like(name)")
    assert resolve(f"{path}:v") == "by_variable"
    with pytest.raises(UnknownAlgorithm, match="there is no file"):
        resolve(str(tmp_path / "other.py"))


def test_threads_that_name_a_file_together_have_its_algorithm(tmp_path):
    """It is executed once, and who comes second waits."""
    path = file(tmp_path, "import time\ntime.sleep(0.2)\na = like('of_threads')")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(resolve, [f"{path}:of_threads"] * 4))
    assert found == ["of_threads"] * 4


def test_packages(monkeypatch, capsys):
    monkeypatch.setattr(user_code, "_brought", [of_ring("packaged")], raising=False)
    point = EntryPoint("packaged", "collectives.analysis.user_code:_brought", user_code.GROUP)

    def points(group, name=None):
        return [point] if group == user_code.GROUP and name in (None, point.name) else []

    monkeypatch.setattr(user_code, "entry_points", points)
    assert resolve("packaged:segments=2") == "packaged:segments=2"
    assert "packaged" in names("allreduce")
    assert main(["list", "allreduce"]) == 0
    assert "allreduce      packaged " in capsys.readouterr().out
    assert main(["simulate", "-n", "4", "--algorithm", "packaged,ring"]) == 0


def test_the_commands_take_files(tmp_path, capsys):
    file = f"{OWN}:both_ways"
    picture = tmp_path / "own.png"
    for arguments, wanted in [
        (["verify", file, "-n", "1-5,12"], "both_ways                   6 sizes"),
        (["list", file, "-n", "4"], "allreduce      both_ways                 6   1.50"),
        (["draw", file, "-n", "3", "-o", str(picture)], "round 3"),
        (["explore", file, "-n", "3", "-o", str(tmp_path / "own.html")], "wrote"),
        (["simulate", "--algorithm", f"{file},ring", "-n", "8"], "  both_ways      ring"),
        (["cost", "--algorithm", file, "-n", "4"], "no closed form"),
    ]:
        assert main(arguments) == 0, arguments
        assert wanted in capsys.readouterr().out, arguments
    assert picture.stat().st_size > 1000
    with pytest.raises(SystemExit):
        main(["verify", "nonsense"])
    assert "is no collective; there are allreduce," in capsys.readouterr().err


def test_the_exercises_complain_as_printed():
    _, _, text = INVENT.partition("## Exercises")
    head = re.findall(r"^from collectives(?!.*Communicator).*", INVENT, re.MULTILINE)
    exercises = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert len(exercises) == 5
    for code, complaint in exercises:
        scope = {}
        exec("\n".join([*head, code]), scope)
        with pytest.raises(ScheduleError) as caught:
            register(scope["exercise"])
        assert " ".join(complaint.split()) in " ".join(str(caught.value).split())


def test_invent_is_about_the_example():
    scope = {}
    exec(re.search(r"```python\n(from collectives.*?)```", INVENT, re.DOTALL)[1], scope)
    resolve(str(OWN))
    register(scope["both_ways"])  # raises if it were another one


def on_12(how):
    """A ring that is ``how`` on 12 ranks only, which registering does not look at."""

    def rounds(rank, size):
        if size == 12:
            yield from how(rank, size)
        yield from ring.allreduce(rank, size)

    return rounds


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (lambda rank, size: 1 // 0, "ZeroDivisionError"),
        (never_ending, "the generator has not ended after 10000 rounds"),
        (lambda rank, size: sys.exit(0), "SystemExit: 0"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["verify", "-n", "12", "--algorithm", "wrong_on_12"],
        ["draw", "wrong_on_12", "-n", "12", "--text"],
        ["simulate", "--algorithm", "wrong_on_12", "-n", "8,12"],
        ["cost", "--algorithm", "wrong_on_12", "-n", "12"],
    ],
    ids=" ".join,
)
def test_commands_meet_what_registering_has_not_seen(how, sentence, command, capsys):
    register(Algorithm("allreduce", "wrong_on_12", on_12(how), chunks=lambda size: size))
    assert main(command) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert "allreduce wrong_on_12 on 12 ranks: rank" in told


@pytest.mark.parametrize("command", ["simulate", "cost"])
def test_models_prove_ones_own(command, capsys):
    def only_to_9(rank, size):
        yield from ring.allreduce(rank, size) if size < 10 or size > 64 else ()

    register(replace(of_ring("to_9", uniform=True), rounds=only_to_9))
    for ranks, code in (9, 0), (12, 2), (64, 2), (65, 0):
        assert main([command, "-n", str(ranks), "--algorithm", "ring,to_9"]) == code
        told, failed = capsys.readouterr()
        assert ("to_9: not proved on more than 64 ranks" in told) == (ranks > 64)
        assert ("rank 0 ends with" in failed) == (code > 0)


def test_options_of_ones_own():
    def turned(rank, size, flip=True, by=1):
        yield from recursive_doubling(rank, size)

    register(Algorithm("allreduce", "turned", turned))
    for options in "flip=0", "flip=1", "by=2":
        assert build("allreduce", f"turned:{options}", 4).chunks == 1
    with pytest.raises(UnknownAlgorithm, match="turned: flip=2 must be 0 or 1"):
        build("allreduce", "turned:flip=2", 4)


def test_commands_leave_out_sizes_that_an_algorithm_is_not_for(capsys):
    def powers(rank, size):
        if size & (size - 1):
            raise UnknownAlgorithm(f"for powers of two, not {size} ranks")
        yield from recursive_doubling(rank, size)

    register(Algorithm("allreduce", "of_powers", powers))
    assert main(["verify", "--algorithm", "of_powers", "-n", "3-8"]) == 0
    told = capsys.readouterr().out
    assert "2 sizes" in told
    assert "not on 4 sizes: for powers of two, not 7 ranks" in told
    assert main(["simulate", "--algorithm", "of_powers,ring", "-n", "4,6"]) == 0
    assert re.search(r"^ +6 +- +[\d.]+  ring$", capsys.readouterr().out, re.MULTILINE)
    assert main(["verify", "allreduce", "-n", "3"]) == 0
    assert re.search(r"not on 1 sizes: for powers.*schedules proved", capsys.readouterr().out, re.S)
    assert main(["verify", "--algorithm", "of_powers", "-n", "3,5"]) == 2
    assert main(["verify", "broadcast", "--algorithm", "spanning_trees", "-n", "2,513"]) == 0
    assert "not on 1 sizes: spanning trees are packed for at most 512" in capsys.readouterr().out
