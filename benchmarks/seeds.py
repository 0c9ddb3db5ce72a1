"""Figures of the course that this project began with, beside ours on virtual ranks.

    python -m benchmarks.seeds              # all tables, in Markdown
    python -m benchmarks.seeds dga          # one of them

Ranks are virtual, and a step's passes take given times, so that each table is the same again.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mpitrain.commands.plan import gigabits
from mpitrain.commands.scale import measured, trained
from mpitrain.config import Config
from mpitrain.config.reading import converted
from mpitrain.metrics.reader import Log
from mpitrain.metrics.records import Epoch, Step
from mpitrain.pipeline.profiles import LayerProfile, write_profile
from mpitrain.search.job import load_job
from mpitrain.search.whole import operations

#: A step's passes on one rank, by Zhu et al. 2021's clients: 0.1 s on each of four.
PASSES_S = 0.4
QUIET = ("run.log_every=1000", "evaluate.every=100")


def run(
    ranks: int, *sets: str, alpha: float = 0.0, bandwidth: float = 12.5, job: str = "digits_mlp",
    layers: int = 3,
) -> Log:  # fmt: skip
    """A perceptron on virtual ranks; ``alpha`` in seconds, GB/s a port."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = [f"layer{number}" for number in range(layers)]
        own = PASSES_S / layers / 3  # a third of it forward
        write_profile(folder / "costs", [LayerProfile(one, own, 2 * own, 0, 0) for one in names])
        words = ["--costs", str(folder / "costs"), "--async-progress"]
        words += ["--alpha", str(1e6 * alpha), "--bandwidth", str(bandwidth)]
        return trained(job, ranks, [*QUIET, *sets], folder / "run", words)


def seconds(log: Log) -> float:
    """Time of all steps."""
    return sum(step.seconds for step in log.of(Step))


def powersgd() -> Iterator[str]:
    """PowerSGD's linear speed-up (Vogels et al. 2019), on a slow link."""
    yield "| workers | dense | powersgd, rank 2 |"
    yield "| ---: | ---: | ---: |"
    first: list[float] = []
    for ranks in (1, 2, 4, 8):
        found = []
        for codec in ("none", "powersgd:rank=2"):
            sets = ("train.steps=12", "model.hidden=[512,512]", f"compress.codec={codec}")
            log = run(ranks, *sets, alpha=0.001, bandwidth=0.005)
            found.append(measured(log).samples_per_s)
        first = first or found
        yield f"| {ranks} | {found[0] / first[0]:.2f} | {found[1] / first[1]:.2f} |"
    yield "published: a line, in a figure without numbers"


#: Speed-ups over FedAvg with K = 5 (Zhu et al. 2021): K = 10 and 20, and DGA with K = 5, D = 20.
DGA = {
    "CIFAR": (1.51, 2.05, 3.16),
    "ImageNet": (1.43, 1.81, 2.55),
    "Shakespeare": (1.66, 2.51, 4.07),
}
#: By delay: accuracy without and with the correction.
CORRECTION = {5: "88.7%, 89.2%", 10: "86.9%, 89.3%", 15: "85.5%, 89.0%", 20: "84.2%, 88.7%"}
#: By ``parallel.weights``: what was published without numbers.
STALENESS = {
    "stash": "learns", "vertical": "hardly another result", "latest": "no meaningful learning",
}  # fmt: skip
#: By keys for the workers' samples: accuracies of ``METHODS``.
PARTITION = {
    "sync.split=iid": (88.7, 88.5, 88.1, 88.6),
    "sync.split=labels sync.labels=3": (48.2, 47.2, 43.9, 48.0),
}
#: Keys of each method.
METHODS = [
    *(("sync.kind=local", f"sync.period={period}") for period in (5, 10, 20)),
    ("sync.kind=delayed", "sync.period=5", "sync.delay=20"),
]


def dga() -> Iterator[str]:
    """Speed-ups of FedAvg and DGA; the first of each row gives the time of an exchange."""
    yield "| data | steps of an exchange | FedAvg, K = 10 | K = 20 | DGA, K = 5, D = 20 |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for data, published in DGA.items():
        # (1 + E/5) / (1 + E/10) is the first speed-up; an exchange is two messages in turn.
        exchange = (published[0] - 1) / (0.2 - 0.1 * published[0])
        alpha = exchange * PASSES_S / 4 / 2
        sets = ("train.steps=80", "sync.agree=80")
        times = [seconds(run(4, *sets, *method, alpha=alpha)) for method in METHODS]
        cells = [f"{a} / {times[0] / b:.2f}" for a, b in zip(published, times[1:], strict=True)]
        yield f"| {data}, published / ours | {exchange:.1f} | {' | '.join(cells)} |"


def correction() -> Iterator[str]:
    """Delayed averaging without its correction and with it (Zhu et al. 2021), no momentum."""
    yield "| delay | ResNet18, CIFAR10, published: without, with | perceptron, digits |"
    yield "| ---: | ---: | ---: |"
    for delay, published in CORRECTION.items():
        sets = [*METHODS[-1][:2], "sync.agree=10", "optim.momentum=0", f"sync.delay={delay}"]
        tests = [run(4, *sets, f"sync.correct={word}").of(Epoch)[-1] for word in ("false", "true")]
        ours = ", ".join(f"{test.metrics['accuracy']:.1%}" for test in tests)
        yield f"| {delay} | {published} | {ours} |"


def partition() -> Iterator[str]:
    """Accuracy of workers whose samples are alike, and differ (Zhu et al. 2021, on CIFAR)."""
    yield "| samples | FedAvg, K = 5 | K = 10 | K = 20 | DGA, K = 5, D = 20 |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for keys, published in PARTITION.items():
        cells = []
        for accuracy, method in zip(published, METHODS, strict=True):
            test = run(4, *method, "sync.agree=10", *keys.split()).of(Epoch)[-1]
            cells.append(f"{accuracy}% / {test.metrics['accuracy']:.1%}")
        yield f"| {keys}, published / ours | {' | '.join(cells)} |"


def staleness() -> Iterator[str]:
    """Ages of weights in a pipeline of six stages (Harlap et al. 2018)."""
    yield "| weights of a micro-batch | published | test loss | accuracy |"
    yield "| --- | --- | ---: | ---: |"
    sets = ["parallel.pipe=6", "model.hidden=[64,64,64,64,64]", "optim.momentum=0", "optim.lr=0.1"]
    sets += ["optim.reference_batch=0", "train.epochs=10"]
    for weights, published in STALENESS.items():
        log = run(6, *sets, f"parallel.weights={weights}", job="mlp_asynchronous", layers=6)
        test = log.of(Epoch)[-1]
        told = f"{test.test_loss:.3f} | {test.metrics['accuracy']:.1%}"
        yield f"| {weights} | {published} | {told} |"


def dgc() -> Iterator[str]:
    """Deep gradient compression's ablation (Lin et al. 2018), on the digits, 0.2% sent."""
    plain = "optim.momentum=0.9"
    topk, dgc = "compress.codec=topk:keep=0.002", "compress.codec=dgc:keep=0.002"
    rows: dict[str, tuple[str, Sequence[str]]] = {
        "baseline": ("92.92%", [plain]),
        "naive pruning": ("no convergence", [plain, topk, "compress.feedback=off"]),
        "+ accumulation": ("91.36%", [plain, topk]),
        "+ accumulation, warm-up": ("91.89%", [plain, f"{topk},warmup=345"]),
        "+ accumulation, correction": ("92.56%", ["optim.momentum=0", dgc]),
        "all": ("93.28%", ["optim.momentum=0", f"{dgc},warmup=345"]),
    }
    yield "| | ResNet-110, CIFAR-10, published | perceptron, digits: accuracy | loss |"
    yield "| --- | ---: | ---: | ---: |"
    for name, (published, sets) in rows.items():
        least = [] if name == "baseline" else ["compress.least=8"]
        test = run(4, *sets, *least).of(Epoch)[-1]
        yield f"| {name} | {published} | {test.metrics['accuracy']:.1%} | {test.test_loss:.3f} |"


def latency() -> Iterator[str]:
    """A step over links of a cluster, of a home and to far ones."""
    yield "| latency | SGD, s a step | DGA |"
    yield "| --- | ---: | ---: |"
    for name, alpha in (("1 us", 1e-6), ("10 ms", 0.01), ("200 ms", 0.2)):
        sets = ("train.steps=40", "sync.agree=40")
        found = [run(4, "train.steps=40", alpha=alpha), run(4, *sets, *METHODS[-1], alpha=alpha)]
        yield f"| {name} | {' | '.join(f'{seconds(log) / 40:.2f}' for log in found)} |"


#: Million parameters, ms of an iteration (A6000, 32 samples), Gb/s.
ITERATIONS = {
    "ResNet18": (11.69, 20, 18.7), "ResNet50": (25.75, 63, 13.1), "Swin-Tiny": (28.10, 119, 7.6),
    "Swin-Base": (88.01, 290, 9.7), "Swin-Large": (196.75, 523, 12.0),
}  # fmt: skip


def bandwidth() -> Iterator[str]:
    """Bandwidth that gradients need, as ``plan -n 2 --step-ms`` prints it."""
    yield "| model | million parameters | ms a step | published Gb/s | ours |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, (millions, milliseconds, published) in ITERATIONS.items():
        ours = gigabits(4e6 * millions, 1e-3 * milliseconds)
        yield f"| {name} | {millions} | {milliseconds} | {published} | {ours:.1f} |"


def training() -> Iterator[str]:
    """Operations of Megatron-LM's training (Shoeybi et al. 2019), as ``plan`` counts them."""
    data = {"name": "tokens", "path": "none", "vocabulary": 51200, "context": 1024}
    model = {"kind": "gpt", "layers": 72, "heads": 24, "width": 3072}
    train = {"batch_size": 512, "steps": 300_000}
    job = load_job(converted({"data": data, "model": model, "train": train}, Config), "this table")
    once = (operations(job) or 0) * train["batch_size"] * train["steps"]
    yield f"Megatron-LM, 8.3 billion: published 12e21; ours {once:.2g} operations, or"
    yield f"{4 / 3 * once:.2g} with activations computed again"


_ALL = powersgd, dga, correction, partition, staleness, dgc, latency, bandwidth, training
TABLES: dict[str, Callable[[], Iterator[str]]] = {one.__name__: one for one in _ALL}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.seeds", description=__doc__)
    parser.add_argument("tables", nargs="*", choices=TABLES, help=", ".join(TABLES))
    for name in parser.parse_args().tables or TABLES:
        print(f"\n{name}: {TABLES[name].__doc__}\n")
        for line in TABLES[name]():
            print(line, flush=True)


if __name__ == "__main__":
    main()
