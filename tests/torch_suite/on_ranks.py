"""The part that runs on the ranks: PyTorch's tests one after the other, each with a fresh group."""

import json
import logging
import os
import random
import re
import sys
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import distributed_c10d as c10d

from collectives.torch import NAME
from collectives.torch.register import register, take_over


def main(backend: str, guise: str, pattern: str, folder: Path, done: set[str]) -> None:
    """Runs the tests that match a pattern, but those that are done.

    Each rank writes lines of JSON to ``folder/RANK.jsonl``: its process, the names, and of each
    test its name, and at its end its name, outcome and reason.
    """
    world = MPI.COMM_WORLD.Dup()
    _prepare(guise or backend, world.size, folder)
    if backend == "mpi":
        take_over()
    else:
        register()
    if guise:
        _disguise(backend, guise)
    if backend != "gloo":
        _translate_events(guise or backend)
    case = _case(world.rank)
    names = unittest.TestLoader().getTestCaseNames(type(case))
    names = [name for name in names if re.search(pattern, name)]
    with open(folder / f"{world.rank}.jsonl", "a") as file:

        def say(*what: object) -> None:
            print(json.dumps(what), file=file, flush=True)

        say("process", os.getpid())
        say("names", names)
        for name in names:
            if name not in done:
                _scratch(world, folder)
                say("begins", name)
                _run(case, name, guise or backend, world, say)
    _meet(world)


def _prepare(backend: str, size: int, folder: Path) -> None:
    """Sets what PyTorch's tests read when they are imported."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    os.environ.update(TEMP_DIR=str(folder), INIT_METHOD=f"file://{folder}/again")
    logging.disable(logging.WARNING)
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("ddp", "subgroup", "gpu"):
        DistTestCases.backend_feature[feature].add(backend)
    DistTestCases.backend_feature["plugin"].add(NAME)


def _disguise(backend: str, guise: str) -> None:
    """Has groups of one backend made where another one is asked for, under the other's name.

    So tests run that are for the other one alone.
    """
    make = c10d._new_process_group_helper

    def made(size, rank, ranks, asked, *args, **named):
        group, store = make(size, rank, ranks, backend if asked == guise else asked, *args, **named)
        if group in c10d._world.pg_map:
            c10d._world.pg_map[group] = asked, c10d._world.pg_map[group][1]
        return group, store

    c10d._new_process_group_helper = made


def _translate_events(shown: str) -> None:
    """Lets tests find our events in the profiler by the name that they know the backend by.

    All are called asynchronous, as tests want that of blocking calls, too.
    """
    from torch.testing._internal.distributed import distributed_test as tests

    find = tests.get_profiling_event

    def found(name, *args, **named):
        events = find(re.sub(f"^{shown}:", f"{NAME}:", name), *args, **named)
        for event in events:
            event.name, event.is_async = name, True
        return events

    tests.get_profiling_event = found


def _case(rank: int) -> unittest.TestCase:
    from torch.testing._internal.common_utils import TestCase, instantiate_parametrized_tests
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    class OnRanks(TestCase, DistributedTest._DistTestBase):
        world_size = property(lambda self: os.environ["WORLD_SIZE"])

    instantiate_parametrized_tests(OnRanks)
    case = OnRanks("test_get_rank")
    case.rank = rank
    return case


def _scratch(world: MPI.Comm, folder: Path) -> None:
    """Gives the next test folders of its own, and the state of a new process."""
    from torch.testing._internal.common_utils import set_rng_seed
    from torch.testing._internal.distributed.distributed_test import Barrier

    _meet(world)
    own = folder / f"test{world.bcast(time.monotonic_ns())}"
    for inner in ("barrier", "test_dir"):
        (own / inner).mkdir(parents=True, exist_ok=True)
    os.environ["TEMP_DIR"] = str(own)
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
    dist.set_debug_level_from_env()
    Barrier.barrier_id = 0
    set_rng_seed()
    random.seed(1)


def _run(case: unittest.TestCase, name: str, backend: str, world: MPI.Comm, say) -> None:
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.distributed import distributed_test as tests

    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    outcome, why, test = "ok", "", getattr(case, name)
    timeout = tests.CUSTOM_PG_TIMEOUT.get(name, tests.default_pg_timeout)
    case.file_name = f"{os.environ['TEMP_DIR']}/store"
    case.init_method = f"file://{case.file_name}"
    try:
        dist.init_process_group(
            backend,
            case.init_method,
            world_size=world.size,
            rank=world.rank,
            timeout=timedelta(seconds=timeout),
        )
        if getattr(test, "__unittest_skip__", False):
            raise unittest.SkipTest(test.__unittest_skip_why__)
        test()
        _meet(world)
        if dist.is_initialized():
            dist.destroy_process_group()
    except unittest.SkipTest as skip:
        outcome, why = "skip", str(skip)
    except SystemExit as end:
        outcome, why = ("skip", skips[end.code]) if end.code in skips else ("fail", repr(end))
    except Exception as error:
        outcome, why = "fail", f"{error!r:.300}"
        traceback.print_exc()
    say("ends", name, outcome, why)
    _meet(world)
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(world: MPI.Comm) -> None:
    """A barrier that leaves the cores to ranks that are behind."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


if __name__ == "__main__":
    backend, guise, pattern, folder, done = sys.argv[1:]
    main(backend, guise, pattern, Path(folder), set(json.loads(done)))
