"""The table of methods: who goes with whom, why the others do not, and its page."""

from functools import cache
from itertools import combinations

import pytest

from mpitrain.__main__ import main
from mpitrain.commands import methods
from mpitrain.config import ConfigError, expect, load
from mpitrain.config.conflicts import CHOSEN, combined, refusals, tables_of, uses
from mpitrain.config.method_table import METHODS
from mpitrain.config.numbers import toml
from mpitrain.config.validation import faults


def refused():
    """Pairs that a job can say and must not have, each with its keys."""
    for pair in combinations(CHOSEN, 2):
        try:
            keys = combined(pair)
        except ValueError:
            continue
        job = tables_of(keys)
        if all(uses(job, method) for method in pair) and [*refusals(job)]:
            yield pair, keys


REFUSED = [*refused()]


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    path = tmp_path_factory.mktemp("methods") / "job.toml"
    path.write_text("")
    return path


def written(value):
    if isinstance(value, list):
        return '[{names = ["*.bias"], lr = 0.5}]'
    return toml(value)


@pytest.mark.parametrize("method", CHOSEN, ids=lambda method: method.name)
def test_each_method_by_itself_is_a_job(method):
    job = tables_of(combined([method]))
    assert uses(job, method)
    assert not [*refusals(job), *faults(job)]


def test_each_refused_pair_is_refused_by_load_with_the_sentence_of_the_table(empty):
    assert len(REFUSED) > 300
    for pair, keys in REFUSED:
        with pytest.raises(ConfigError) as caught:
            load(empty, [f"{key}={written(value)}" for key, value in keys.items()])
        key, _, sentence = str(caught.value).partition(": ")
        assert (key, sentence) in [*refusals(tables_of(keys))], pair
        assert " needs " in sentence and "; " in sentence and " or " in sentence


def test_what_is_needed_is_lacked_by_some_and_the_other_way_round():
    needed = {need for method in METHODS for need in method.needs}
    assert needed == {need for method in METHODS for need in method.lacks}
    assert len({method.name for method in METHODS}) == len(METHODS)


def test_the_page_has_the_table_behind_its_introduction(capsys, monkeypatch):
    monkeypatch.setattr(methods, "table", cache(methods.table))  # which takes seconds
    assert main(["methods"]) == 0
    table = capsys.readouterr().out
    assert main(["methods", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("# Methods, and which go together\n")
    assert page.endswith(f"## The table\n\n```text\n{table}```\n")


@pytest.mark.parametrize(
    ("names", "answers"),
    [
        (["zero-1", "pipe"], ["zero-1 + pipe: yes, with parallel.zero = 1, parallel.pipe = 2"]),
        (["local", "zero"], [f"local + zero-{n}: no. sync.kind: local SGD nee" for n in (1, 2, 3)]),
        (["compress.sparse", "adam"], ['pruned-ring + adam: yes, with compress.codec = "topk", ']),
        (["zero-1", "zero-2"], ["a job has one or the other: parallel.zero is one of 1 and 2"]),
        (["adam", "momentum"], ["the others take the place of sgd with momentum"]),
        (["batch-norm", "server"], ["no. server.ranks: batch norm needs forward passes of all"]),
        (["server", "clip-norm", "adam"], ["no. optim.clip_norm: clip_norm needs the gradients"]),
    ],
)
def test_the_command_answers_for_a_combination(capsys, names, answers):
    assert main(["methods", *names]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(answers)
    assert all(answer in line for answer, line in zip(answers, lines, strict=True))


def test_a_method_that_is_not_there_is_said_to_be_near_another(capsys):
    assert main(["methods", "pip", "clientz"]) == 2
    assert "there is no method 'clientz'; did you mean 'clients'?" in capsys.readouterr().err


def test_what_only_a_caller_knows_is_refused_by_the_same_table(empty):
    served = load(empty, ["server.ranks=1"])
    expect(load(empty), "batch-norm", "torch", "link", "shrink", "described")
    for situation in ("batch-norm", "link", "shrink", "described", "steps", "drill"):
        with pytest.raises(ConfigError, match=r"; set server\.ranks = 0"):
            expect(served, situation, command="mpitrain x")
