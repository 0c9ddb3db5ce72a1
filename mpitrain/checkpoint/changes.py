"""Differences of a job from the one that wrote a checkpoint, and the constants of its model."""

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from collectives import provenance
from collectives.calls.tables import described
from mpitrain.config import Config, by_key
from mpitrain.config.unread import readers

if TYPE_CHECKING:
    from mpitrain.checkpoint.manifest import Progress
    from mpitrain.checkpoint.reader import CheckpointReader
    from mpitrain.training.parts import Parts

#: Keys that make it another training, on any layout of ranks; own objects have no files.
_DECISIVE = re.compile(
    r"(model|loss|compress)\..*|data\.(?!workers|path).*|own\.(?!schedule|splits|cuts).*"
    r"|federated\.(?!rounds).*|optim\.name|run\.(seed|random|dtype|compute)|train\.batch_size"
    r"|train\.epochs"
)
#: Differences after which losses and tests measure something else.
_OF_TESTS = re.compile(r"(loss|data)\.|own\.(loss|data|metrics) |it had other data")


class Origin(NamedTuple):
    """Order of the samples, empty for any; file of constants; MPI library and tuning table."""

    order: str
    constants: str
    sums: str


def kept_constants(parts: "Parts") -> dict[str, Any]:
    """Frozen parameters and buffers in a torch module's ``state_dict``, by the names there."""
    wanted = set(parts.objects.names.values())
    found = {name.removeprefix("part0."): one for name, one in parts.model.constants().items()}
    return {name: tensor for name, tensor in found.items() if name in wanted}


def name_of_file(constants: Mapping[str, Any]) -> str:
    """Name of a file of constants, which depends on their names and values; empty for none."""
    found = hashlib.blake2b(digest_size=16)
    for name, one in sorted(constants.items()):
        tensor = one.detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(sys.modules["torch"].uint8).numpy())
    return f"constants-{found.hexdigest()}.safetensors" if constants else ""


def origin_of(parts: "Parts") -> Origin:
    """The origin of a run, as rank 0 has it at the first call; collective."""
    if parts.origin is None:
        own = None
        if parts.comm.rank == 0:
            sums = f"{provenance()['mpi']}, tuning table {described()}"
            own = Origin(parts.sampler.described, name_of_file(kept_constants(parts)), sums)
        parts.origin = parts.comm.bcast(own)
    return parts.origin


def _decisive(job: Config) -> dict[str, object]:
    """Values by key, but of keys that nothing reads, as those of clients where there are none.

    Epochs are those of each client; else they only say when to end.
    """
    usual, unread = Config(), set[str]()
    for table, key, by in readers():
        reader = attrgetter(f"{table}.{by.key}")
        if f"{table}.{by.key}" in unread or not by.reads(reader(job), reader(usual)):
            unread.add(f"{table}.{key}")
    return {
        key: str(value).rpartition(":")[2] if key.startswith("own.") else value
        for key, value in by_key(msgspec.to_builtins(job)).items()
        if _DECISIVE.fullmatch(key) and key not in unread
        if job.federated.clients or key != "train.epochs"
    }


def differences(parts: "Parts", checkpoint: "CheckpointReader") -> Iterator[str]:
    """Differences that make it another training; digests compare constants and data."""
    then, now, manifest = _decisive(checkpoint.job), _decisive(parts.config), checkpoint.manifest
    for key in then:
        if key in now and then[key] != now[key]:
            yield f"{key} was {then[key]}, and is {now[key]}"
    order, constants, _ = origin_of(parts)
    if order not in ("", manifest.order):
        yield f"the order of samples was {manifest.order}, and is {order}"
    if manifest.constants != constants:
        yield "frozen parameters or buffers had other values"
    if manifest.data != parts.data_digest:
        path = parts.config.data.path
        yield f"it had other data: what data.path = {path!r} or own.clients says has changed since"


def progress_of(parts: "Parts", checkpoint: "CheckpointReader") -> tuple["Progress", list[str]]:
    """Progress of a checkpoint, without losses and tests of something else, and notes on these."""
    progress, rates = checkpoint.manifest.progress, parts.measured_rates
    if any(map(_OF_TESTS.match, differences(parts, checkpoint))):
        note = "tests begin anew: those before, and the losses, measured something else"
        return replace(progress, seen={}, losses=[], measured=[]), [note]
    then, now = checkpoint.job.evaluate.watch, parts.config.evaluate.watch
    if rates and progress.measured and then != now:
        note = f"the schedule's tests begin anew: evaluate.watch was {then}, and is {now}"
        return replace(progress, measured=[]), [note]
    return progress, []
