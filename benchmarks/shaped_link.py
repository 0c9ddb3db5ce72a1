"""A job on two hosts with a shaped link, beside its virtual cluster on the link that was measured.

    sudo .venv-openmpi/bin/python -m benchmarks.shaped_link --rate 100

The hosts are network namespaces of this machine, with a rank each, and have one connection, as MPI
makes it by default.  A table of broadcasts over their link is measured, ``collectives fit`` fits
latency and rate to it, and the job trains in three layouts on the hosts and on virtual ranks of
that link.  Its steps are mostly messages, so that other work on the machine matters little, and the
less, the slower the link.  Printed are the median steps and their ratios.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from collectives.analysis.fit import fit, read
from collectives.commands.arguments import positive
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Step
from tests.cluster.hosts import environment, hosts

#: A wide layer between narrow ones: 4 MB of gradients, and 32 KiB of activations a sample.
_JOB = (
    "digits_mlp", "model.hidden=[64,8192,64]", "train.batch_size=256", "train.epochs=9",
    "parallel.algorithm=ring",
)  # fmt: skip
_LAYOUTS = {
    "data": ("parallel.data=2",),
    "pipe": ("parallel.pipe=2", "parallel.schedule=1f1b", "train.micro_batches=4"),
    "zero": ("parallel.zero=3",),
}
_BENCH = "-m collectives bench broadcast -b 8 -e 4M -f 8 -n 1 -w 1 --repeats 5 --algorithm chain -J"


def main() -> None:
    """Print a row for each layout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=positive, default=100, help="Mb/s of a host's link (100)")
    parser.add_argument("--steps", type=positive, default=12, help="steps of each layout (12)")
    moves = "messages move while virtual ranks compute, each as soon as its receive is posted"
    parser.add_argument("--async-progress", action="store_true", help=moves)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, hosts(2, options.rate) as up:
        folder = Path(made)
        quiet: Any = {"env": environment(), "check": True, "stdout": subprocess.DEVNULL}

        def trained(layout: str, *, on_hosts: bool) -> list[str]:
            words = ["-m", "mpitrain", "train", _JOB[0]]
            own = (*_JOB[1:], *_LAYOUTS[layout], f"train.steps={options.steps}")
            for key in (*own, f"run.dir={folder / layout}{'_hosts' * on_hosts}"):
                words += ["--set", key]
            return words

        def real(words: list[str]) -> None:
            up.run(0, up.mpirun(1, [sys.executable, *words], connections=1), **quiet)

        real([*_BENCH.split(), str(folder / "link.json")])
        fits = fit(read([folder / "link.json"])[0])
        # Small messages tell the latency, large ones the rate.
        alpha, beta = fits[0].model.alpha, fits[-1].model.beta
        link = ["--alpha", str(1e6 * alpha), "--bandwidth", str(1e-9 / beta)]
        rows = []
        for layout in _LAYOUTS:
            real(trained(layout, on_hosts=True))
            virtual = [*trained(layout, on_hosts=False), "--virtual", "2", *link]
            virtual += ["--async-progress"] * options.async_progress
            subprocess.run([sys.executable, *virtual], **quiet)
            rows.append([_step(folder / f"{layout}{hosted}") for hosted in ("_hosts", "")])
    print(f"{options.rate} Mb/s; fitted: {1e6 * alpha:.0f} us, {1e-6 / beta:.2f} MB/s")
    print("layout  measured ms  predicted ms  ratio")
    for layout, (measured, predicted) in zip(_LAYOUTS, rows, strict=True):
        ratio = predicted / measured
        print(f"{layout:6} {1e3 * measured:12.1f} {1e3 * predicted:13.1f} {ratio:6.3f}")


def _step(folder: Path) -> float:
    """Seconds of the median step, without the first ones."""
    steps = read_records(folder / "metrics.jsonl").of(Step)
    return median(step.seconds for step in steps[2:])


if __name__ == "__main__":
    main()
