"""The order in which ``mpitrain search`` puts layouts of a job beside the order that it measures.

python -m benchmarks.layouts gpt_data -n 2 --set data.path=jobs/examples/license.txt

Each layout trains some steps by ``mpiexec`` in each round, and its least median step counts.
Printed are Kendall's tau of the two orders, and what the layout that the search puts first loses
to the fastest one.
"""

import argparse
from itertools import combinations

from mpitrain.commands import search
from mpitrain.config import load


def main() -> None:
    """Print both times of each layout, and how well the orders agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    search.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=40, help="steps that each layout trains (40)")
    text = "take the --top layouts at equal distances from this many of the fastest"
    parser.add_argument("--among", type=int, default=0, help=text)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each layout, in turn (3)")
    options = parser.parse_args()
    config = load(options.config, options.set)
    job = search.job(config, options)
    found = job.fastest(max(options.top, options.among), search.refusal(config))
    found = found[:: -(-len(found) // options.top)]
    rounds = [
        [search.measured(options, ran, options.steps) for ran in found]
        for _ in range(options.rounds)
    ]
    times = [min(own) for own in zip(*rounds, strict=True)]
    print(" predicted ms  measured ms  layout")
    for ran, seconds in zip(found, times, strict=True):
        print(f"{1e3 * ran.seconds:13.2f} {1e3 * seconds:12.2f}  {ran}")
    print(
        f"Kendall's tau {tau([ran.seconds for ran in found], times):.2f} over {len(found)} layouts"
    )
    print(f"the first is {times[0] / min(times):.2f} times the fastest")


def tau(predicted: list[float], times: list[float]) -> float:
    """Kendall's tau: pairs in the same order less those in the other, of all pairs."""
    pairs = list(combinations(zip(predicted, times, strict=True), 2))
    agree = sum(((a[0] < b[0]) == (a[1] < b[1])) * 2 - 1 for a, b in pairs if a[0] != b[0])
    return agree / max(1, sum(a[0] != b[0] for a, b in pairs))


if __name__ == "__main__":
    main()
