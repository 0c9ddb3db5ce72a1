"""What a job may not say where messages arrive as over a slower link."""

from collections.abc import Iterator

from mpitrain.config.errors import ConfigError
from mpitrain.config.tables import Config


def expect_on_link(job: Config) -> None:
    """Of ranks whose messages are delayed (:func:`collectives.delayed`), and of nothing else.

    Raises:
        ConfigError: the job sends something in another way, which would arrive at once.
    """
    for key, why in _conflicts(job):
        raise ConfigError(
            f"{key}: {why}, as if there were no link; set another value, or leave COLLECTIVES_LINK "
            "and delayed() out"
        )


def _conflicts(job: Config) -> Iterator[tuple[str, str]]:
    """As (key, what arrives at once)."""
    if job.parallel.checksums:
        yield "parallel.checksums", "messages with checksums arrive at once"
    if job.parallel.node_shared:
        yield "parallel.node_shared", "what ranks keep in a node's memory is there at once"
    if job.server.ranks:
        yield "server.ranks", "messages to and from servers arrive at once"
    if job.server.hogwild:
        yield "server.hogwild", "what ranks keep in a node's memory is there at once"
    if job.sync.kind == "quorum":
        yield "sync.kind", "messages of a quorum arrive at once"
