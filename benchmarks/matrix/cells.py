"""Cells of the matrix: settings of each method, layout and link in a job."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from benchmarks.matrix.results import DENSE, SHARED, Cell
from collectives import Link, MPITransport, delayed
from collectives import algorithms as known_algorithms
from collectives.analysis.user_code import resolve
from mpitrain.compress import parse

#: Differences, by name, from the example ``digits_mlp`` or ``gpt_data``: models of 1 to 2 MB, which
#: a rank trains faster than a slow link sums them.
JOBS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "digits": (
        "digits_mlp",
        ("model.hidden=[512, 512]", "optim.schedule=constant", "optim.milestones=[]",
         "optim.lr=0.05"),
    ),
    "gpt": (
        "gpt_data",
        ("model.layers=2", "model.width=128", "data.context=32", "optim.schedule=constant",
         "optim.lr=1e-3", "parallel.bucket_bytes=26214400"),
    ),
}  # fmt: skip
#: Settings beside a codec by its name: these codecs have the momentum.
_BESIDE: Mapping[str, tuple[str, ...]] = {"dgc": ("optim.momentum=0",)}
#: Settings of a job by the name of a method; other names are codecs.
METHODS: Mapping[str, tuple[str, ...]] = {
    DENSE: (),
    "bf16": ("compress.codec=bf16",),
    "int8": ("compress.codec=int8",),
    "powersgd": ("compress.codec=powersgd:rank=4",),
    "topk": ("compress.codec=topk:keep=0.01",),
    "dgc": ("compress.codec=dgc:keep=0.05,masking=false",),
    "sign": ("compress.codec=sign",),
    "local": ("sync.kind=local", "sync.period=8", "sync.agree=8"),
    "diloco": (
        "sync.kind=local", "sync.period=8", "sync.agree=8",
        "sync.outer=nesterov:lr=0.4,momentum=0.8",
    ),
    "delayed": ("sync.kind=delayed", "sync.period=4", "sync.delay=4", "sync.agree=4"),
}  # fmt: skip
ALGORITHMS = ("ring", "butterfly", "direct", "parameter_server")
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "data": (),
    "pipe x data": ("parallel.pipe=2", "train.micro_batches=2"),
    "tensor x data": ("parallel.tensor=2",),
    "zero 1": ("parallel.zero=1",),
}
#: By name, the text of a link; any other name is such a text itself.
LINKS: Mapping[str, str] = {
    SHARED: "",
    "1 Gb/s": "latency=100us,bandwidth=1Gb/s",
    "100 Mb/s": "latency=1ms,bandwidth=100Mb/s",
    "100 ms": "latency=100ms,bandwidth=100Mb/s",
}


def usual() -> list[Cell]:
    """Default cells: each dimension beside the first value of the others, and some pairs."""
    found: dict[Cell, None] = {}

    def add(*values: Sequence[str]) -> None:
        found.update(dict.fromkeys(Cell(*one) for one in product(*values)))

    some = (DENSE, "int8", "powersgd", "topk", "diloco")
    add(["digits"], [*METHODS], ["ring"], ["data"], [*LINKS])
    add(["digits"], [DENSE], ALGORITHMS, ["data"], [*LINKS])
    add(["digits"], some, ["ring"], [*LAYOUTS], [SHARED, "100 Mb/s"])
    add(["gpt"], some, ["ring"], ["data"], [SHARED, "100 Mb/s", "100 ms"])
    return list(found)


def quick() -> list[Cell]:
    """A few of each kind, refused ones too."""
    return [
        Cell("digits", DENSE, "ring", "data", SHARED),
        Cell("digits", "powersgd", "ring", "data", SHARED),
        Cell("digits", DENSE, "ring", "data", "1 Gb/s"),
        Cell("digits", "topk", "ring", "data", "1 Gb/s"),
        Cell("digits", "signum", "ring", "zero 1", SHARED),
    ]


def chosen(
    jobs: Sequence[str],
    methods: Sequence[str],
    algorithms: Sequence[str],
    layouts: Sequence[str],
    links: Sequence[str],
) -> list[Cell]:
    """All combinations, each once, with the first value of unnamed dimensions.

    Raises:
        ValueError: there is no such job, method, algorithm, layout or link.
    """
    for what, given, known in (("job", jobs, JOBS), ("layout", layouts, LAYOUTS)):
        for name in given:
            if name not in known:
                raise ValueError(f"there is no {what} {name!r}; there are {', '.join(known)}")
    for method in methods:
        if method not in METHODS:
            parse(method)
    for algorithm in algorithms:
        known_algorithms.check("allreduce", resolve(algorithm))
    for link in links:
        if link not in LINKS:
            Link.read(link)
    dimensions = (jobs, methods, algorithms, layouts, links)
    first = Cell("digits", DENSE, "ring", "data", SHARED)
    every = product(*(some or [default] for some, default in zip(dimensions, first, strict=True)))
    return [Cell(*one) for one in dict.fromkeys(every)]


def every() -> list[Cell]:
    """All combinations of all values."""
    return chosen([*JOBS], [*METHODS], ALGORITHMS, [*LAYOUTS], [*LINKS])


def overrides(cell: Cell) -> Iterator[str]:
    """Settings of a cell on top of the example, as ``table.key=value``."""
    yield from JOBS[cell.job][1]
    yield f"parallel.algorithm={cell.algorithm}"
    yield from settings(cell.method)
    yield from LAYOUTS[cell.layout]


def settings(method: str) -> list[str]:
    """Settings of a method, as ``table.key=value``."""
    own = METHODS.get(method, (f"compress.codec={method}",))
    return [*own, *_BESIDE.get(method.partition(":")[0], ())]


def example(cell: Cell) -> Path:
    """Example job of a cell."""
    return Path(JOBS[cell.job][0])


def transport(cell: Cell) -> type[MPITransport]:
    """Transport of a cell."""
    text = LINKS.get(cell.link, cell.link)
    return delayed(text) if text else MPITransport
