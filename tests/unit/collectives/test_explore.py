"""Data that the explorer's page is told, against real runs and a replay in strings."""

import json
import re

import numpy as np
import pytest

from collectives.__main__ import main
from collectives.algorithms import build
from collectives.analysis.explore import COPY, record
from collectives.execution.local import run
from collectives.schedule import Copy, Recv, Schedule, Send, recvbuf, sendbuf
from tests.cases import every_algorithm


def states(told):
    """Node that each ``(rank, buffer, cell)`` holds, at first and after each round."""
    held = {(rank, buffer, i): node for rank, buffer, i, node, _ in told["start"]}
    yield dict(held)
    for steps in told["rounds"]:
        for rank, buffer, i, node, _, _ in steps["writes"]:
            held[rank, buffer, i] = node
        yield dict(held)


def spelled(nodes, node):
    """The text on the page, ``((r2+r3)+r0)``."""
    left, right = nodes[node]
    return f"r{-1 - left}" if left < 0 else f"({spelled(nodes, left)}+{spelled(nodes, right)})"


@every_algorithm
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in_place"])
def test_its_sums_have_the_bits_of_a_real_run(algorithm, in_place):
    """In floating point another order of the additions gives another sum."""
    contract = algorithm.schedule(2).contract
    if in_place and (contract.in_place is None or not algorithm.in_place):
        pytest.skip("has no room for its input in place")
    combine = np.maximum if contract.idempotent else np.add
    rng = np.random.default_rng(1)
    for size in (1, 2, 3, 5, 8):
        schedule = algorithm.schedule(size)
        lengths = [schedule.limits(rank)["sendbuf"] for rank in range(size)]
        inputs = [rng.standard_normal(n).astype("f4") * 10 ** rng.uniform(0, 4) for n in lengths]
        told = record(schedule, in_place)
        sums = []
        for left, right in told["nodes"]:
            if left < 0:
                sums.append(inputs[-1 - left][right])
            else:
                sums.append(combine(sums[left], sums[right]))
        *_, last = states(told)
        outputs = run(schedule, [items.copy() for items in inputs], combine, in_place=in_place)
        for rank, output in enumerate(outputs):
            for i in range(schedule.limits(rank)["recvbuf"]):
                if contract.result(schedule.member(rank), i) is not None:
                    assert sums[last[rank, 1, i]] == output[i]


def test_a_move_names_both_ends():
    told = record(build("allreduce", "ring", 3))
    kind, *places = told["rounds"][1]["moves"][0]
    # Rank 0 gets recvbuf[0] of rank 2 and adds its own sendbuf[0]; rank 2 sent it in its round 1.
    assert (kind, places) == (1, [2, 0, 1, 0, 1, 0, 1, 0, 0, 1])
    assert [write[-1] for write in told["rounds"][1]["writes"]] == [0, 1, 2]


def test_the_ends_of_a_message_may_be_in_rounds_of_other_numbers():
    rounds = ([(Send(1, sendbuf[0]), Copy(recvbuf[0], sendbuf[0]))], [(), (Recv(0, recvbuf[0]),)])
    schedule = Schedule("broadcast", "late", 2, 1, 0, False, lambda rank: iter(rounds[rank]))
    first, second = record(schedule)["rounds"]
    assert [move[0] for move in first["moves"]] == [COPY]
    assert [move[10] for move in second["moves"]] == [0]


def test_more_ranks_than_bits_of_a_number():
    told = record(build("allreduce", "butterfly", 64))
    *_, last = states(told)
    text = spelled(told["nodes"], last[63, 1, 0])
    assert sorted(map(int, re.findall(r"\d+", text))) == list(range(64))


def test_the_page_is_one_file_that_loads_nothing(tmp_path, capsys):
    path = tmp_path / "new" / "ring.html"
    words = ["explore", "allreduce", "ring", "--with", "swing", "-n", "4,8", "-o", str(path)]
    assert main(words) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    page = path.read_text()
    assert "{{" not in page
    assert not re.search(r"https?://|\bsrc=|@import|url\(", page)
    told = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert told["sizes"] == [4, 8]
    assert [a["name"] for a in told["algorithms"]] == ["ring", "swing"]
    ring = json.dumps(record(build("allreduce", "ring", 8)))
    assert told["algorithms"][0]["runs"]["8"] == json.loads(ring)
