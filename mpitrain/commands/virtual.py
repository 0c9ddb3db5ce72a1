"""``--virtual``: a job on virtual ranks of one process, on the clock of a modelled network.

Import it after :func:`collectives.virtual.install`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import lcm
from pathlib import Path
from statistics import median
from typing import Any

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from collectives.commands import in_words, network
from collectives.virtual import Deadlock, VirtualCluster, end_process, here
from mpitrain.commands import ranks
from mpitrain.config import Config, ConfigError, load
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Step
from mpitrain.metrics.words import digits
from mpitrain.pipeline.profiles import LayerProfile, ProfileError, read_profile
from mpitrain.report import write_report
from mpitrain.training.parts import Parts

#: Part of a layer's backward pass that a pass takes, by the letter of its name.
_BACKWARD = {"B": 1.0, "I": 0.5, "W": 0.5}


def run(argv: Sequence[str], options: argparse.Namespace) -> int:
    """Run a command on virtual ranks, and write the report of training; returns the exit code."""
    trains = options.command == "train"
    try:
        profile = read_profile(options.costs) if options.costs else None
        config = load(options.config, options.set) if trains else Config()
        folder = Path(config.run.dir)
        modelled = network(options, options.virtual)
    except (ConfigError, ProfileError, ValueError) as error:
        print(f"mpitrain: {error}", file=sys.stderr)
        return 2
    if trains:
        _hook(profile)
        argv = [*argv, "--set", "run.trace=true"]
    cluster = VirtualCluster(
        options.virtual,
        modelled,
        measures=profile is None,
        slower=options.slower,
        async_progress=options.async_progress,
    )
    try:
        with threadpool_limits(1):  # a rank has a core
            codes = cluster.run(lambda: ranks.run(argv))
    except Deadlock as error:
        print(f"mpitrain: {error}", file=sys.stderr)
        end_process(1)  # the ranks' clean-up could only wait again
    if trains and not any(codes):
        _tell(cluster, folder, f"{in_words(options)}, computing by {options.costs or 'CPU time'}")
    return max(codes)


def _tell(cluster: VirtualCluster, folder: Path, where: str) -> None:
    """Print the time of a step and each rank's shares, and write the report with its picture."""
    log = read_records(folder / "metrics.jsonl").since_start()
    seconds = [step.seconds for step in log.of(Step)]
    step = f"a step takes {digits(1e3 * median(seconds))} ms" if seconds else "no step"
    print(f"{len(cluster.ranks)} virtual ranks on {where}: {step}")
    print(cluster.table())
    print("shares of all the run, tests too; the reduction above has packing and waits in it")
    try:
        print(write_report(folder))
    except ImportError as error:
        print(f"mpitrain: {error}", file=sys.stderr)


def _hook(profile: Sequence[LayerProfile] | None) -> None:
    """Let the ranks' times count from the first step, and passes cost what the profile says."""
    train, loop = ranks.run_training, ranks.loop_of_job

    def training(*given: Any, **named: Any) -> Any:
        here().spent = dict.fromkeys(here().spent, 0.0)
        return train(*given, **named)

    def costed(*given: Any, span: Callable[..., Any], **hooks: Any) -> Any:
        costs = _Costs(profile or (), span)
        made = loop(*given, span=costs.span, **hooks)
        costs.expect(made.parts)
        return made

    ranks.run_training = training
    if profile is not None:
        ranks.loop_of_job = costed  # type: ignore[assignment]


class _Costs:
    """Passes of one rank, which take the time of a profile.

    A rank of a tensor or context group has its part of a layer or of the positions.  Replicas make
    the micro-batch of the profile as many parts as the least common multiple of their numbers;
    servers are none of them, and a client has the whole micro-batch.
    """

    def __init__(self, profile: Sequence[LayerProfile], span: Callable[..., Any]) -> None:
        self._layers = {layer.name: layer for layer in profile}
        self._inner = span
        self._parts: Parts | None = None

    @contextmanager
    def span(self, name: str, category: str, **arguments: int) -> Iterator[None]:
        """The activity, and then the time that it costs."""
        with self._inner(name, category, **arguments):
            yield
            if self._parts is not None and category == "compute":
                seconds = self._seconds(name[0], arguments["chunk"])
                here().compute(seconds * here().cluster.slower)

    def expect(self, parts: Parts) -> None:
        """From now on passes are those of these parts.

        Raises:
            ConfigError: on all ranks: the profile is of other layers.
        """
        names = [name for stage in parts.partition.layers for name in stage]
        if missing := [name for name in names if name not in self._layers]:
            raise ConfigError(
                f"--costs: the profile has no layer {missing[0]}; make one of this job by "
                "mpitrain profile"
            )
        self._parts = parts

    def _seconds(self, letter: str, chunk: int) -> float:
        assert self._parts is not None
        grid = self._parts.grid
        names = self._parts.partition.of_stage(grid.place.stage)[chunk]
        layers = [self._layers[name] for name in names]
        if letter == "F":
            seconds = sum(layer.forward_s for layer in layers)
        else:
            seconds = _BACKWARD[letter] * sum(layer.backward_s for layer in layers)
        layout, config = grid.layout, self._parts.config
        workers = [width - config.server.ranks for width in layout.replicas]
        parts = 1 if config.federated.clients else lcm(*workers)
        return seconds / layout.tensor / layout.context / parts
