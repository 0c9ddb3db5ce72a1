"""Stages and replicas of a job whose ``parallel.partition`` is ``"auto"``."""

from collections.abc import Sequence

from mpi4py import MPI
from msgspec.structs import replace

from mpitrain.checkpoint.manifest import CheckpointError
from mpitrain.checkpoint.reader import CheckpointReader, numbered
from mpitrain.checkpoint.saving import checkpoints
from mpitrain.config import Config, ConfigError
from mpitrain.pipeline.partition import TwoLevelLinks, describe, partition_batch
from mpitrain.pipeline.profiles import profiled
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.ranks.together import by_rank_0


def auto_stages(comm: MPI.Intracomm, config: Config, *, go_on: bool = False) -> Config:
    """The job with the stages and replicas that the partitioner finds, which rank 0 prints.

    Collective.  The job stays as it is unless ``parallel.partition`` is ``"auto"``, there are
    ``parallel.links``, and no other key says how many stages there are.

    Args:
        comm: the ranks.
        config: the job.
        go_on: take the stages of the newest checkpoint in ``run.dir``, if it has as many ranks.

    Raises:
        ConfigError: on all ranks: ``parallel.profile`` is no profile, or the stages do not go with
            the other methods of the job.
    """
    if not _is_asked(config):
        return config
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    nodes = comm.allgather(node.bcast(comm.rank))
    node.Free()

    def plan() -> tuple[Config, str]:
        return (go_on and _as_before(config, len(nodes))) or auto_stages_on(config, nodes)

    job, text = by_rank_0(comm, plan, ConfigError)
    if comm.rank == 0:
        print(text, flush=True)
    return job


def saved_stages(comm: MPI.Intracomm, config: Config, now: Config) -> Config | None:
    """The job with the stages of the newest checkpoint in ``run.dir``; collective.

    None: :func:`auto_stages` would leave the job as it is, there is no such checkpoint, or the
    stages are those that the job has ``now``.
    """
    if not _is_asked(config):
        return None
    found = by_rank_0(comm, lambda: _as_before(config, comm.size), ConfigError)
    if not found:
        return None
    if comm.rank == 0:
        print(found[1], flush=True)
    old, new = found[0].parallel, now.parallel
    same = (old.partition, old.replicas) == (new.partition, new.replicas)
    return None if same else found[0]


def auto_stages_on(config: Config, nodes: Sequence[int]) -> tuple[Config, str]:
    """Like :func:`auto_stages`, in one process, and a text; ``nodes``: node of each rank."""
    if not _is_asked(config):
        return config, ""
    synchronous = SCHEDULES[config.parallel.schedule].synchronous
    profile, speeds = profiled(config), config.parallel.links
    links = TwoLevelLinks(1e9 * speeds[-1], 1e9 * speeds[0], nodes)
    parts = config.train.micro_batches
    found, costs = partition_batch(profile, links, len(nodes), parts, synchronous=synchronous)
    job = _with(config, found.sizes, found.replicas)
    return job, f"parallel.partition = 'auto': {describe(found, costs)}"


def _is_asked(config: Config) -> bool:
    p = config.parallel
    is_given = p.pipe > 1 or p.replicas or p.data
    alone = p.tensor == p.context == p.space == p.experts == p.chunks == 1
    return p.partition == "auto" and bool(p.links) and not is_given and alone


def _as_before(config: Config, ranks: int) -> tuple[Config, str] | None:
    """The stages of the newest checkpoint; None: there is none, or it has other ranks."""
    for path in numbered(checkpoints(config)).values():
        try:
            before = CheckpointReader(path).job.parallel
        except CheckpointError:  # going on from it says why
            continue
        if sum(before.replicas) != ranks or not isinstance(before.partition, tuple):
            return None
        shape = "-".join(map(str, before.replicas))
        job = _with(config, before.partition, before.replicas, profile="")
        return job, f"parallel.partition = 'auto': {shape}, as in {path}"
    return None


def _with(config: Config, sizes: tuple[int, ...], replicas: tuple[int, ...], **keys: str) -> Config:
    keyed = replace(config.parallel, partition=sizes, replicas=replicas, **keys)
    try:
        return replace(config, parallel=keyed)
    except ValueError as error:
        shape = "-".join(map(str, replicas))
        raise ConfigError(
            f"parallel.partition: 'auto' finds {shape}, and {error}; or set parallel.pipe"
        ) from error
