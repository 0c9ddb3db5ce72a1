"""The training job: what a TOML file may say, its defaults, and the check of what it says.

    config = load(Path("jobs/examples/digits.toml"), ["optim.lr=0.1"])

Every field is documented in the class of its table.
"""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from collectives import UnknownAlgorithm, algorithms

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]
Momentum = Annotated[float, Meta(ge=0, lt=1)]
Count = Annotated[int, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=0)]


class ConfigError(ValueError):
    """The job asks for something that does not exist or cannot be."""


class Run(Struct, frozen=True, forbid_unknown_fields=True):
    """[run]

    Attributes:
        seed: of the initial parameters and of the order of samples.
        dtype: of parameters, gradients and activations.
        dir: folder for ``metrics.jsonl``; an earlier run's is replaced.  When left out, the job
            file's name without its suffix, under ``runs/``.
        log_every: steps from one console line to the next.
    """

    seed: Seed = 0
    dtype: Literal["float32", "float64"] = "float32"
    dir: str = "runs/unnamed"
    log_every: Count = 10


class Data(Struct, frozen=True, forbid_unknown_fields=True):
    """[data]

    Attributes:
        name: ``digits`` is scikit-learn's 1797 scans of handwritten digits, 8x8 points each.
        test_fraction: part of the samples that is kept for the test accuracy.
    """

    name: Literal["digits"] = "digits"
    test_fraction: Fraction = 0.2


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """[model]

    Attributes:
        kind: ``mlp``: linear layers.  ``convnet``: blocks of 3x3 convolution, ReLU and 2x2 max
            pooling, then linear layers.
        hidden: widths of the linear layers before the last one.
        channels: output channels of each block of the convnet.
    """

    kind: Literal["mlp", "convnet"] = "convnet"
    hidden: tuple[Count, ...] = (64,)
    channels: tuple[Count, ...] = (16, 32)


class Optim(Struct, frozen=True, forbid_unknown_fields=True):
    """[optim]

    Attributes:
        name: ``sgd``: stochastic gradient descent with momentum.
        lr: learning rate for a batch of ``reference_batch`` samples.
        reference_batch: samples; the rate in use is ``lr * train.batch_size / reference_batch``
            (linear scaling rule, Goyal et al. 2017).
        warmup_epochs: epochs in which the rate climbs from ``lr`` to the scaled one.
        schedule: of the rate after that.  ``cosine`` falls to 0 at the end, ``step`` multiplies
            it by ``decay`` at each epoch of ``milestones``.
        milestones: epochs, counted from 0.
        decay: factor.
        momentum: part of the velocity that a step keeps.
        nesterov: look ahead along the velocity.
        weight_decay: this times a parameter is added to its gradient.
    """

    name: Literal["sgd"] = "sgd"
    lr: Positive = 0.05
    reference_batch: Count = 64
    warmup_epochs: NonNegative = 0.0
    schedule: Literal["constant", "cosine", "step"] = "constant"
    milestones: tuple[Count, ...] = ()
    decay: Fraction = 0.1
    momentum: Momentum = 0.9
    nesterov: bool = False
    weight_decay: NonNegative = 0.0


class Train(Struct, frozen=True, forbid_unknown_fields=True):
    """[train]

    Attributes:
        epochs: passes over the training samples.
        batch_size: samples in a step over all ranks; each takes its share of them.
    """

    epochs: Count = 10
    batch_size: Count = 64


class Parallel(Struct, frozen=True, forbid_unknown_fields=True):
    """[parallel]

    Attributes:
        algorithm: of the all-reduce of gradients, as ``python -m collectives list`` names them;
            ``native`` is the MPI library's, ``auto`` takes what was measured to be fastest.
        bucket_bytes: gradients are reduced in pieces of at least this many bytes.
        overlap: reduce a piece while the layers below it are still computing their gradients.
    """

    algorithm: str = "auto"
    bucket_bytes: Count = 25 * 2**20
    overlap: bool = True


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """A training job; each attribute is the TOML table of its name."""

    run: Run = Run()
    data: Data = Data()
    model: Model = Model()
    optim: Optim = Optim()
    train: Train = Train()
    parallel: Parallel = Parallel()

    def __post_init__(self) -> None:
        if self.optim.warmup_epochs >= self.train.epochs:
            raise ValueError(
                f"optim.warmup_epochs = {self.optim.warmup_epochs:g} must be less than "
                f"train.epochs = {self.train.epochs}"
            )
        try:
            name, _ = algorithms.parse(self.parallel.algorithm)
            if name not in ("auto", "native"):
                algorithms.find("allreduce", name)
        except UnknownAlgorithm as error:
            raise ValueError(f"parallel.algorithm: {error}") from error


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a job from a TOML file.

    Args:
        path: the file.
        overrides: ``table.key=value`` each, applied in turn on top of the file.  Values are
            written as in TOML; what is not TOML is a string, so that ``=ring`` needs no quotes.

    Raises:
        ConfigError: the file cannot be read, or it asks for something that cannot be; the message
            is one sentence with the place as a dotted path.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the job file {path}: {reason}") from error
    for override in overrides:
        _apply(tables, override)
    _check_names(tables, Config, ())
    try:
        config = msgspec.convert(tables, Config)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        where = place.strip("`").lstrip(".")
        raise ConfigError(f"{where}: {reason}" if where else reason) from error
    if "dir" in tables.get("run", {}):
        return config
    return replace(config, run=replace(config.run, dir=f"runs/{path.stem}"))


def _apply(tables: dict[str, Any], override: str) -> None:
    place, equals, text = override.partition("=")
    *parents, key = place.strip().split(".")
    if not equals or not key or not parents:
        raise ConfigError(f"--set takes table.key=value, as in optim.lr=0.1, not {override!r}")
    table = tables
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{place}: {parent} is a value in the job file, not a table")
    try:
        table[key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[key] = text.strip()


def _check_names(value: object, kind: Any, path: tuple[str, ...]) -> None:
    """Raise for an unknown key or choice, with the nearest known one; msgspec checks the rest."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
        for key, item in value.items() if isinstance(value, dict) else ():
            if key not in fields:
                raise ConfigError(_unknown("key", ".".join((*path, key)), key, fields))
            _check_names(item, fields[key], (*path, key))
        return
    known = msgspec.inspect.type_info(kind)
    choices = known.values if isinstance(known, msgspec.inspect.LiteralType) else None
    if choices and isinstance(value, str) and value not in choices:
        raise ConfigError(_unknown("value", f"{'.'.join(path)} = {value!r}", value, choices))


def _unknown(what: str, subject: str, word: str, known: Any) -> str:
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"expected one of {', '.join(known)}"
    return f"{subject}: unknown {what}; {hint}"
