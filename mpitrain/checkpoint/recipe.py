"""Description of a program's own objects, which decide on numbers beside the job's tables."""

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import MAGIC_NUMBER
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mpitrain.checkpoint.described import Description
from mpitrain.config import Config, by_key
from mpitrain.data.sampler import OwnOrder
from mpitrain.ranks.same import described

if TYPE_CHECKING:
    from mpitrain.checkpoint.reader import CheckpointReader
    from mpitrain.training.parts import Parts
from mpitrain import extras

log = logging.getLogger("mpitrain")

ORDER = "the order of samples"
#: Beginning of the names of values' digests.
_VALUES = "values of "
#: Options of an optimiser that may change during a run, or change no numbers.
_FREE = frozenset({"lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"})


class Recipe(Struct, frozen=True, forbid_unknown_fields=True):
    """Texts by name (:class:`~mpitrain.checkpoint.described.Description`).

    Attributes:
        parts, options, code: see there.
        bytecode: format of Python's bytecode; code of other formats is not compared.
        changing: names that the program changes as it runs, such as counters and caches, and that
            are not compared; None before the first checkpoint.
    """

    parts: dict[str, str]
    options: dict[str, str]
    code: dict[str, str]
    bytecode: str
    changing: list[str] | None = None

    def settled(self, later: "Recipe") -> "Recipe":
        """This recipe, with the names that changed until ``later`` in the run."""
        found: set[str] = set()
        for before, after in ((self.parts, later.parts), (self.options, later.options)):
            for name in before.keys() | after.keys():
                if before.get(name) != after.get(name) and not name.startswith(_VALUES):
                    # A container with other keys changes as a whole.
                    found.add(name if name in before and name in after else name.rpartition(".")[0])
        return replace(self, changing=sorted(found))

    def differences(self, now: "Recipe") -> Iterator[tuple[str, str, str]]:
        """Names that differ, with both texts; names that both have come first."""
        found = [("parts", True), ("options", False)]
        if self.bytecode == now.bytecode:
            found.append(("code", True))
        late = []
        for table, both in found:
            before, after = getattr(self, table), getattr(now, table)
            for name in dict.fromkeys((*before, *after)):
                if any(name == one or name.startswith(f"{one}.") for one in self.changing or ()):
                    continue
                texts = name, before.get(name, "nothing"), after.get(name, "nothing")
                if name in before and name in after:
                    if texts[1] != texts[2]:
                        yield texts
                elif both and not texts[0].removeprefix("code of ").startswith("metrics."):
                    late.append(texts)
        yield from late


def constants(parts: "Parts") -> dict[str, Any]:
    """Frozen parameters and buffers by the module's names."""
    found = parts.model.constants()
    return {name.removeprefix("part0."): tensor for name, tensor in found.items()}


def kept_constants(parts: "Parts") -> dict[str, Any]:
    """Constants that are in a torch module's ``state_dict``, by the names of its file."""
    wanted = set(parts.objects.names.values())
    return {name: tensor for name, tensor in constants(parts).items() if name in wanted}


def recipe_of(parts: "Parts") -> Recipe:
    """The recipe of a job, which is rank 0's; collective.

    At the first call, rank 0 reads the constants once, and warns of other ranks' other objects.
    """
    if parts.recipe is None:
        comm = parts.comm
        own = _made(parts, values=comm.rank == 0)
        parts.recipe = comm.bcast(own)
        # A name that one of two ranks lacks may be a cache.
        found = [one for one in parts.recipe.differences(own) if "nothing" not in one[1:]]
        for rank, different in enumerate(comm.allgather(found[:1])):
            for name, first, other in different if comm.rank == 0 else ():
                log.warning(
                    "%s is %s on rank 0 and %s on rank %s; if numbers follow from it, they are not "
                    "those of one process: give all ranks the same", name, first, other, rank,
                )  # fmt: skip
    return parts.recipe


def settled_recipe_of(parts: "Parts") -> Recipe:
    """Recipe for a checkpoint, on rank 0 with the names that have changed since; collective."""
    found = recipe_of(parts)
    if found.changing is None and parts.comm.rank == 0:
        train = parts.data.train
        others_read = parts.config.data.workers or not extras.Streamed.made(train)
        if extras.OwnSamples.made(train) and others_read:
            with suppress(Exception):  # a read shows here what changed in the other processes
                train.read_anew()
        parts.recipe = found = found.settled(_made(parts, values=False))
    return found


def _decisive(job: Config) -> dict[str, object]:
    """Values of a job, by key, that make it another training, on any layout of ranks.

    Own objects have no files.  Epochs are those of each client; else they only say when to end.
    """
    counts = re.compile(
        r"(model|loss|compress)\..*|data\.(?!workers|path).*|own\.(?!schedule|splits|experts|cuts).*"
        r"|federated\.(?!rounds).*|optim\.name|run\.(seed|random|dtype|compute)|train\.batch_size"
        r"|train\.epochs"
    )
    return {
        key: str(value).rpartition(":")[2] if key.startswith("own.") else value
        for key, value in by_key(msgspec.to_builtins(job)).items()
        if counts.fullmatch(key) and (job.federated.clients or key != "train.epochs")
    }


def differences(parts: "Parts", checkpoint: "CheckpointReader") -> Iterator[str]:
    """Differences that make it another training; a digest compares the data."""
    then, now = _decisive(checkpoint.job), _decisive(parts.config)
    found = [(key, then[key], now[key]) for key in then if key in now and then[key] != now[key]]
    for place, before, after in (*found, *checkpoint.manifest.recipe.differences(parts.recipe)):
        yield f"{place} was {before}, and is {after}"
    if checkpoint.manifest.data != parts.data_digest:
        path = parts.config.data.path
        yield f"it had other data: what data.path = {path!r} holds has changed since"


def name_of_constants(recipe: Recipe, names: Mapping[str, str]) -> str:
    """Name of a module's file of constants, which depends on their values; empty without any."""
    wanted = set(names.values())
    own = {
        name: text
        for name, text in recipe.parts.items()
        if name.startswith(f"{_VALUES}model.") and name.removeprefix(f"{_VALUES}model.") in wanted
    }
    if not own:
        return ""
    found = hashlib.blake2b(repr(sorted(own.items())).encode(), digest_size=16)
    return f"constants-{found.hexdigest()}.safetensors"


def _made(parts: "Parts", *, values: bool = True) -> Recipe:
    found = Description(values=values)
    own = parts.objects
    for name, what in (("model", own.layers), ("loss", own.loss), ("metrics", own.metrics)):
        for key, one in what.items() if isinstance(what, Mapping) else [("", what)]:
            _add(found, f"{name}.{key}" if key else name, getattr(one, "function", one))
    for name, tensor in constants(parts).items():
        found.add_array(f"model.{name}", tensor)  # nothing without values
    _add_optimizers(found, parts)
    found.values = False  # the digest of the data has them
    if extras.OwnSamples.made(parts.data.train):
        data = parts.data.train.data
        _add(found, "data", data.source if extras.Stream.made(data) else data)
        if parts.data.train.collate is not None:
            _add(found, "collate_fn", parts.data.train.collate)
    found.options[ORDER] = parts.sampler.described
    if isinstance(parts.sampler, OwnOrder):
        _add(found, "sampler", parts.sampler.given)
    return Recipe(found.parts, found.options, found.code, MAGIC_NUMBER.hex())


def _add(found: Description, name: str, what: Any) -> None:
    """Describes an object, by its kind alone if it fails when it is looked at."""
    try:
        found.add(name, what)
    except Exception:
        found.parts[name] = type(what).__qualname__


def _add_optimizers(found: Description, parts: "Parts") -> None:
    """Describes each group's optimiser, and which parameters are in other groups than the first."""
    numbers: dict[int, int] = {}
    for name in parts.model.trained():
        optimizer = parts.updater.grouping(name).optimizer
        number = numbers.setdefault(id(optimizer), len(numbers))
        own = f"optimizer{number or ''}"
        if own not in found.parts:
            kind = getattr(optimizer, "kind", None)  # torch's class; its options follow
            _add(found, own, optimizer if kind is None else kind)
            for key, value in described(optimizer).items():
                found.add(key.replace("optimizer", own), value)
        if number:
            found.parts[f"optimizer of {name}"] = own
    for key in [key for key in found.options if key.rpartition(".")[2] in _FREE]:
        if key.startswith("optimizer"):
            del found.options[key]
