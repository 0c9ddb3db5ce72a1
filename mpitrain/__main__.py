"""The command line: ``mpirun -n 4 mpitrain train job.toml``."""

import sys
from collections.abc import Sequence

from collectives import LaunchError
from collectives.about import load_mpi
from collectives.commands import while_read
from mpitrain import extras
from mpitrain.commands import arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 for success; 1 if training failed; 2 for a job that cannot be run; 75
        (EX_TEMPFAIL) if training was asked to stop and can go on.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    words = given[: given.index("--")] if "--" in given else given
    is_virtual = any(word.startswith("--virtual") for word in words)
    options = arguments.parse(given) if is_virtual and arguments.needs_ranks(words) else None
    if options or arguments.needs_ranks(given):
        try:
            load_mpi()
        except LaunchError as error:
            if {"-h", "--help"} & set(given):
                arguments.parse(given)
            print(f"mpitrain: {error}", file=sys.stderr)
            return 2
        if options:
            from collectives.virtual import install

            install()  # before anything is imported that uses MPI
            from mpitrain.commands import virtual

            return virtual.run(given, options)
        from mpitrain.commands import ranks

        return ranks.run(given)
    with while_read():
        return extras.run_offline(arguments.parse(given))


if __name__ == "__main__":
    sys.exit(main())
