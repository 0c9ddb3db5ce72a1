"""The command ``collectives``: list, verify and draw need no MPI; bench runs under mpirun."""

import argparse
import sys

from collectives.errors import CollectiveError


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["run"]:  # its errors are the program's, and its start is every rank's
        from collectives.run.program import main as run

        return run(given[1:])
    from collectives import about
    from collectives.commands import bench, explore, models, program, schedules, tune

    parser = argparse.ArgumentParser(
        prog=about.program("collectives"),
        description="Collective algorithms over MPI: list, prove, draw and simulate them without "
        "MPI; measure them under mpirun, beside the MPI library's own.",
        allow_abbrev=False,
    )
    program.add_version(parser)
    program.add_verbose(parser)
    commands = program.add_commands(parser)
    schedules.add(commands)
    explore.add(commands)
    bench.add(commands)
    models.add(commands)
    tune.add(commands)
    commands.add_parser("run", help="run a program of mpi4py, unchanged, on our collectives")
    try:
        with program.while_read():
            options = program.parsed(parser, given)
            return options.run(options)
    except CollectiveError as error:
        print(f"collectives: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        print(
            f"collectives: {error.filename}: {error.strerror}; name another file", file=sys.stderr
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
