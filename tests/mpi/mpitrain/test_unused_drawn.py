"""Drawn modules of which the loss uses now this and now that, in every way of training."""

import os
import re
import traceback

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from mpitrain.compress import CODECS, parse
from mpitrain.compress.dgc import DGC
from mpitrain.config import method_table as methods
from tests.mpi.mpitrain.fits import RANKS
from tests.mpi.mpitrain.unused_twins import Case, check

torch = pytest.importorskip("torch", reason="torch is not installed: make test TORCH=1")
pytestmark = [pytest.mark.mpi, pytest.mark.at_most(5)]
#: Drawn examples of a quick and a slow test; ``SWEEPS`` as for drawn moments of faults.
FEW, MANY = 3, 10 * int(os.environ.get("SWEEPS", "3"))
USES = st.sampled_from(["always", "never", "aside", 0, 1, 0, 1])
TREES = st.recursive(
    st.tuples(USES, st.just(())),
    lambda trees: st.tuples(USES, st.lists(trees, max_size=2).map(tuple)),
    max_leaves=4,
)
FLAGS = st.booleans()


@st.composite
def cases(draw, tables):
    """Cases with any module and optimiser, and with what ``tables`` draws."""
    given = draw(tables)
    codec = given.get("compress", {}).get("codec", "none")
    plain = codec in CODECS and isinstance(parse(codec), DGC)
    own = draw(FLAGS)
    name = "sgd" if plain else draw(st.sampled_from(["sgd", "adam", "adamw", "lamb"]))
    optimizer = {"name": name, "lr": 0.05 if name == "sgd" else 0.01}
    optimizer["weight_decay"] = draw(st.sampled_from([0.0, 0.3]))
    if name == "sgd":
        optimizer["momentum"] = 0.0 if plain else draw(st.sampled_from([0.0, 0.9]))
        optimizer["nesterov"] = optimizer["momentum"] > 0 and draw(FLAGS)
    optimizer["clip_norm"] = draw(st.sampled_from([0.0, 0.5]))
    optimizer["average"] = draw(st.sampled_from([0.0, 0.7]))
    batch_size = draw(st.sampled_from([5, 12, 2]))
    samples = batch_size * draw(st.integers(4, 8)) - draw(st.integers(0, 1))
    special = st.lists(st.integers(0, samples - 1), min_size=1, max_size=4).map(tuple)
    return Case(
        trees=tuple(draw(st.lists(TREES, min_size=1, max_size=4))),
        tied=draw(FLAGS),
        whole="pipe" not in given.get("parallel", {}) and draw(FLAGS),
        special=(draw(special), draw(special)),
        samples=samples,
        batch_size=batch_size,
        micro_batches=draw(st.integers(1, 3)),
        optimizer=optimizer,
        own=own or name == "lamb",
        settings=given,
    )


PARALLEL = {
    "bucket_bytes": st.sampled_from([1, 600, 2**20]),
    "recompute": FLAGS,
    "overlap": FLAGS,
    "checksums": FLAGS,
}
#: Codes of shards: of single numbers, without bias.
OF_SHARDS = ("bf16", "int8:rounding=stochastic", "qsgd", "terngrad")


def coded(codecs):
    return st.fixed_dictionaries(
        {"codec": st.sampled_from(codecs), "least": st.sampled_from([0, 20])},
        optional={"start": st.just(1)},
    )


@st.composite
def of_every_step(draw):
    """Gradients that are summed in each step, as they are or by codes."""
    parallel = draw(st.fixed_dictionaries(PARALLEL)) | {"zero": draw(st.integers(0, 3))}
    if not parallel["zero"]:
        parallel["node_shared"] = draw(FLAGS)
    found = {"parallel": parallel}
    shards = parallel["zero"] > 1 or parallel.get("node_shared")
    match draw(st.sampled_from(["dense", "dense", "coded", "adasum"])):
        case "coded":
            found["compress"] = draw(coded(OF_SHARDS if shards else sorted(CODECS)))
        case "adasum":
            found["sync"] = {"combine": "adasum"}
    return found


@st.composite
def of_pipelines(draw):
    parallel = draw(st.fixed_dictionaries(PARALLEL))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zero_bubble"]))
    return {"parallel": parallel | {"pipe": RANKS, "schedule": schedule}}


@st.composite
def of_workers(draw):
    """Workers that train by themselves and meet now and then."""
    kind = draw(st.sampled_from(["local", "local", "delayed"]))
    period = draw(st.integers(1, 3))
    sync = {"kind": kind, "period": period, "start": draw(st.integers(0, 2))}
    sync["agree"] = draw(st.integers(1, 3))
    codes = sorted(CODECS)
    if kind == "delayed":
        sync["delay"] = draw(st.integers(0, 5))
    else:
        sync["outer"] = draw(st.sampled_from(["plain", "momentum:lr=0.01", "nesterov"]))
        sync["state"] = draw(st.sampled_from(["own", "averaged"]))
        if period > 1 and draw(FLAGS):  # the streaming form
            sync |= {"delay": draw(st.integers(1, period - 1)), "state": "own"}
            sync |= {"fragments": draw(st.integers(1, min(3, period)))}
            sync["mix"] = draw(st.sampled_from([0.3, 0.0, 0.5, 0.9]))
    found = {"sync": sync, "parallel": draw(st.fixed_dictionaries(PARALLEL))}
    match draw(st.sampled_from(["dense", "dense", "coded", "adasum"])):
        case "coded":
            found["compress"] = draw(coded(codes))
        case "adasum" if kind == "local":
            sync["combine"] = "adasum"
    return found


#: Sentences with which the trainer may refuse a drawn job.
REFUSALS = (
    r"keeps nothing that drifts apart",
    r"warms up by itself",
    r"cannot be cut into \d+",
    r"must be at most \d+",
    *(
        f"needs {re.escape(need)}, and "
        for need in (
            methods.CODED, methods.ELEMENTWISE, methods.NO_RESIDUAL, methods.ONE_SUM,
            methods.RANK_GRADIENTS, methods.SIZES, methods.WHOLE_SUM,
        )
    ),
)  # fmt: skip
WAYS = {"every step": (of_every_step, check), "workers": (of_workers, check)}
if RANKS > 1:
    WAYS |= {"pipelines": (of_pipelines, check)}


class Drawing:
    """Examples that rank 0 draws and all ranks train.

    Attributes:
        refused: of each example whether the trainer has refused it.
    """

    def __init__(self, comm, folder, check):
        self.comm, self.folder, self._check = comm, folder, check
        self.refused = []

    def run(self, tables, examples):
        """Fails on all ranks with the first case that does; collective."""
        if self.comm.rank:
            while isinstance(case := self.comm.bcast(None), Case):
                self._verdict(case)
            assert case is None, case
            return

        def one_after_the_other(case):
            self.comm.bcast(case)
            if wrong := self._verdict(case):
                pytest.fail(f"{case}\n{wrong}", pytrace=False)

        failed = "rank 0 has ended"
        # Behind the tenth, hypothesis changes earlier ones a little: rounds of ten are more unlike.
        rounds = settings(
            max_examples=min(examples, 10),
            deadline=None,
            database=None,
            phases=[Phase.generate],  # to find smaller ones takes minutes
            suppress_health_check=list(HealthCheck),
        )
        try:
            for number in range(0, examples, 10):
                rounds(seed(number)(given(cases(tables))(one_after_the_other)))()
            failed = None
        except BaseException as error:
            failed = str(error)
            raise
        finally:
            self.comm.bcast(failed)

    def _verdict(self, case):
        """A fault on some rank, as text that all ranks get; collective."""
        said = wrong = ""
        try:
            said = self._check(case, self.comm, self.folder / str(len(self.refused)))
            assert not said or re.search("|".join(REFUSALS), said), f"it refuses: {said}"
        except Exception:
            wrong = traceback.format_exc()
        self.refused.append(bool(said))
        every = self.comm.allgather((said, wrong))
        if len({said for said, _ in every}) > 1:
            return f"not all ranks refuse it alike: {every}"
        return next((f"rank {rank}: {w}" for rank, (_, w) in enumerate(every) if w), "")


#: Few drawn modules can be cut into four.
QUICK = [(way, FEW) for way in WAYS if way != "pipelines" or RANKS < 4]
SLOW = [pytest.param(way, MANY, marks=pytest.mark.slow) for way in WAYS]


@pytest.mark.parametrize(("way", "examples"), QUICK + SLOW)
def test_what_the_loss_leaves_out_is_left_alone(comm, folder, way, examples):
    tables, checked = WAYS[way]
    drawing = Drawing(comm, folder, checked)
    drawing.run(tables(), examples)
    assert sum(drawing.refused) <= len(drawing.refused) / 2, "most examples were refused"
