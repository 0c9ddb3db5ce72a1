"""Commands that need no ranks."""

import argparse
import sys
from pathlib import Path

from mpitrain.config import ConfigError


def run(options: argparse.Namespace) -> int:
    """Run one command; returns the exit code."""
    try:
        return _COMMANDS[options.command](options)
    except BrokenPipeError:
        raise
    except (ConfigError, ValueError, RuntimeError, OSError, ImportError) as error:
        told: Exception | str = error
        if isinstance(error, OSError) and error.filename:
            told = f"{error.filename}: {error.strerror}; name another file or folder"
        print(f"mpitrain: {told}", file=sys.stderr)
        return 2


def schedules(options: argparse.Namespace) -> int:
    """Prove, time and draw schedules."""
    from mpitrain.pipeline import draw
    from mpitrain.pipeline.actions import Pipeline
    from mpitrain.pipeline.explore import explorer
    from mpitrain.pipeline.replay import replay
    from mpitrain.pipeline.schedules import SCHEDULES
    from mpitrain.pipeline.simulate import Times, simulate

    unknown = set(options.names) - set(SCHEDULES)
    if unknown:
        raise ConfigError(f"no schedule {sorted(unknown)[0]!r}; there are {', '.join(SCHEDULES)}")
    times = Times(*options.times)
    p, m = options.stages, options.micro_batches
    pipelines = {
        name: Pipeline((1,) * p, m, options.chunks if name == "interleaved" else 1)
        for name in options.names or SCHEDULES
    }
    for name, pipeline in pipelines.items():
        schedule = SCHEDULES[name]
        report = replay(schedule.generate, pipeline)
        found = simulate(schedule.generate, pipeline, times)
        formula = schedule.bubble(p, m, pipeline.chunks, *options.times)
        print(f"{name}: {schedule.description}")
        print(
            f"  bubble {found.bubble:.1%} (formula {formula:.1%}), activations held "
            f"{[report.held[place] for place in pipeline.places()]}, oldest weights "
            f"{max(report.staleness.values())} updates"
        )
        print(draw.text(found, pipeline, min(options.times) / pipeline.chunks))
        if options.output:
            options.output.mkdir(parents=True, exist_ok=True)
            rows = [
                (f"stage {place[0]}", [b for b in found.blocks if b.place == place])
                for place in pipeline.places()
            ]
            path = options.output / f"{name}.png"
            draw.picture(rows, path, f"{name}, {p} stages, {m} micro-batches")
            print(f"  drawn in {path}")
    if options.html:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        options.html.write_text(explorer(pipelines, times), encoding="utf-8")
        print(f"wrote {options.html}")
    return 0


def plan(options: argparse.Namespace) -> int:
    """Print a layout before it runs."""
    from mpitrain.commands.plan import explain
    from mpitrain.config import load

    print(explain(load(options.config, options.set), options.ranks))
    return 0


def cut(options: argparse.Namespace) -> int:
    """Partition a profile."""
    from mpitrain.pipeline.partition import ClusterLinks, Costs, describe, partition
    from mpitrain.pipeline.profiles import read_profile

    costs = Costs(read_profile(options.profile), ClusterLinks(options.bandwidth), options.memory)
    print(describe(costs, partition(costs, options.workers)))
    return 0


def report(options: argparse.Namespace) -> int:
    """Write a run's report."""
    from mpitrain.report import write_report

    print(write_report(options.run))
    return 0


def export(options: argparse.Namespace) -> int:
    """Write a checkpoint's parameters."""
    from mpitrain.checkpoint.export import export as write

    done = write(options.checkpoint, options.output, torch=options.torch)
    for why in done.refused:
        print(f"checkpoint refused: {why}", file=sys.stderr)
    print(f"{done.tensors} tensors of {done.folder} written to {options.output}")
    return 0


def submit(options: argparse.Namespace) -> int:
    """Submit a job, or print its script."""
    from mpitrain.commands.submitting import run as submitted

    print(submitted(options), end="" if options.dry_run else "\n")
    return 0


def keys(options: argparse.Namespace) -> int:
    """Print the keys of a job file."""
    from mpitrain.commands.keys import keys as show

    show(options.table, as_markdown=options.markdown)
    return 0


def examples(options: argparse.Namespace) -> int:
    """List the example jobs."""
    from mpitrain.config import examples as packaged
    from mpitrain.config import load

    found = packaged.examples()
    for name, path in found.items():
        reads = Path(load(path).data.path).name
        print(f"{name:<17} {packaged.summary(path)}" + (f" Reads {reads}." if reads else ""))
    print(f"in {packaged.folder() / 'examples'}; --set data.path=FILE reads another text")
    return 0


def init(options: argparse.Namespace) -> int:
    """Copy the examples and scripts."""
    from mpitrain.config import examples as packaged

    print(f"{packaged.copy(options.folder)} has the job scripts, and examples/ in it the jobs")
    return 0


def compare(options: argparse.Namespace) -> int:
    """Print a table of runs."""
    from mpitrain.commands.compare import compare as table

    print(table(options.runs), end="")
    return 0


_COMMANDS = {
    "submit": submit,
    "compare": compare,
    "examples": examples,
    "keys": keys,
    "init": init,
    "schedules": schedules,
    "plan": plan,
    "partition": cut,
    "report": report,
    "export": export,
}
