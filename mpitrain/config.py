"""The training job: what a TOML file may say, its defaults, and the check of what it says.

    config = load(Path("jobs/examples/digits.toml"), ["optim.lr=0.1"])

Every field is documented in the class of its table.
"""

import difflib
import math
import os
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from collectives import ScheduleError, UnknownAlgorithm, algorithms
from collectives.analysis.own import named
from mpitrain import examples
from mpitrain.metric_names import refusal

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]
Momentum = Annotated[float, Meta(ge=0, lt=1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
#: Bytes of a job file; more is something else, as a device that never ends.
_LARGEST = 1 << 20


class ConfigError(ValueError):
    """The job asks for something that does not exist or cannot be."""


class Run(Struct, frozen=True, forbid_unknown_fields=True):
    """[run]

    Attributes:
        seed: seed of the initial parameters and of the order of samples.
        dtype: type of parameters, gradients and optimiser state.
        compute: type of activations and of the parameters that layers see; 16-bit types keep the
            parameters themselves in ``dtype``.
        loss_scale: at first, for ``compute = "float16"``; it is halved when a gradient overflows
            and doubled after ``loss_scale_window`` steps without.
        loss_scale_window: steps.
        on_nonfinite: what all ranks do when a loss or a gradient is not finite: ``stop``, or
            ``skip`` the update.
        dir: folder for metrics and checkpoints, of one job at a time; an earlier run's metrics are
            replaced, its trace is removed, and its checkpoints are moved to
            ``checkpoints/earlier``, unless it is resumed.  When left out, the job file's name
            without its suffix, under ``runs/``.
        log_every: steps from one console line to the next.
        check_every: steps from one comparison of the replicas to the next; 0: after epochs only.
        tensorboard: write curves to ``tensorboard/``, too; needs tensorboardX.
        trace: write ``trace.json``, what each rank did when, for Perfetto or chrome://tracing.
    """

    seed: Seed = 0
    dtype: Literal["float32", "float64"] = "float32"
    compute: Literal["same", "float16", "bfloat16"] = "same"
    loss_scale: Positive = 65536.0
    loss_scale_window: Count = 2000
    on_nonfinite: Literal["stop", "skip"] = "stop"
    dir: str = "runs/unnamed"
    log_every: Count = 10
    check_every: Annotated[int, Meta(ge=0)] = 0
    tensorboard: bool = False
    trace: bool = False


class Data(Struct, frozen=True, forbid_unknown_fields=True):
    """[data]

    Attributes:
        name: ``digits`` is scikit-learn's 1797 scans of handwritten digits, 8x8 points each;
            ``idx`` a folder of MNIST's files; ``arrays`` an ``.npz`` file of ``inputs`` and
            ``labels``; ``text`` a text file, ``tokens`` a folder of ``train.bin`` and ``val.bin``
            (uint16), both for language models; ``clicks`` drawn choices of users, for the
            recommender.
        path: the file or folder, relative to where the job starts or, if there is none, to the
            job file.  Parts of it are read while the job trains: replace it by a new
            file of its name, for a rank that reads what was cut off is killed (SIGBUS).
        units: what a text is made of.
        context: positions of a sample of text.
        vocabulary: number of tokens in ``tokens``; 0: found in the data.
        samples, tables, rows: for ``clicks``: samples, features, and values of each feature.
        test_fraction: part of the samples that is kept for the test.
        workers: processes of each rank that read samples ahead of the steps, where a step waits
            for them; 0: none.  The order of the samples is the same for any number.
    """

    name: Literal["digits", "idx", "arrays", "text", "tokens", "clicks"] = "digits"
    path: str = ""
    units: Literal["characters", "bytes"] = "characters"
    context: Count = 64
    vocabulary: Annotated[int, Meta(ge=0)] = 0
    samples: Count = 4096
    tables: Count = 8
    rows: Count = 1000
    test_fraction: Fraction = 0.2
    workers: Annotated[int, Meta(ge=0, le=256)] = 0


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """[model]

    Attributes:
        kind: ``mlp``: linear layers.  ``convnet``: blocks of 3x3 convolution, ReLU and 2x2 max
            pooling, then linear layers.  ``vgg``: the same with two convolutions a block.
            ``resnet``: residual blocks with group norm, then a mean over the image.  ``gpt``: a
            decoder-only transformer with tied embeddings.  ``recommender``: embedding tables,
            spread over the data-parallel ranks, then linear layers.
        hidden: widths of the linear layers before the last one.
        channels: output channels of each block of a convnet.
        layers: blocks of the gpt.
        heads: heads of its attention; their number must divide ``width``.
        width: features of a position, or of a row of an embedding table.
    """

    kind: Literal["mlp", "convnet", "vgg", "resnet", "gpt", "recommender"] = "convnet"
    hidden: tuple[Count, ...] = (64,)
    channels: tuple[Count, ...] = (16, 32)
    layers: Count = 4
    heads: Count = 4
    width: Count = 64


class Loss(Struct, frozen=True, forbid_unknown_fields=True):
    """[loss]

    Attributes:
        name: ``cross_entropy`` of classes, labels being integers; ``mean_squared_error`` of
            numbers; ``binary_cross_entropy`` of numbers that are 0 or 1, or probabilities.
        smoothing: part of each label that cross_entropy spreads evenly over the classes.
    """

    name: Literal["cross_entropy", "mean_squared_error", "binary_cross_entropy"] = "cross_entropy"
    smoothing: Annotated[float, Meta(ge=0, lt=1)] = 0.0


class Evaluate(Struct, frozen=True, forbid_unknown_fields=True):
    """[evaluate]

    Attributes:
        metrics: what the tests measure besides the loss: of classes ``accuracy``, ``top5`` (or
            another number), ``f1`` (mean over the classes), ``perplexity``; of numbers ``mae``,
            ``rmse``.  When left out, ``accuracy`` or ``mae``.
        every: epochs from one test to the next; there is one at the end in any case.
        patience: training ends after so many tests in a row that were no better than the best one
            before them; 0: never.
        watch: by which value tests are better, ``loss`` or a metric.  Of a metric of one's own, the
            job says which way, as in ``higher score`` or ``lower score``.
    """

    metrics: tuple[str, ...] = ()
    every: Count = 1
    patience: Annotated[int, Meta(ge=0)] = 0
    watch: str = "loss"


class Group(Struct, frozen=True, forbid_unknown_fields=True):
    """An element of ``optim.groups``.

    Attributes:
        names: patterns of parameters' names, as ``*.bias``; the first group that fits has them.
        lr: factor on the learning rate.
        weight_decay: theirs; when left out, as the others'.
    """

    names: tuple[str, ...]
    lr: NonNegative = 1.0
    weight_decay: NonNegative | None = None


class Optim(Struct, frozen=True, forbid_unknown_fields=True):
    """[optim]

    Attributes:
        name: ``sgd`` with momentum, ``adam``, ``adamw``; ``lars`` and ``lamb`` give each tensor a
            rate of its own, for large batches.
        lr: learning rate for a batch of ``reference_batch`` samples.
        reference_batch: samples; the rate in use is ``lr * train.batch_size / reference_batch``
            (linear scaling rule, Goyal et al. 2017).  0: ``lr`` as it is.
        warmup_epochs: epochs in which the rate climbs from ``lr`` to the scaled one (from 0 if it
            is not scaled).
        schedule: the rate after that, over ``train.epochs``.  ``cosine`` falls to 0 at the end,
            ``step`` multiplies it by ``decay`` at each epoch of ``milestones``, ``wsd`` is constant
            and falls to 0 in a line in the last ``decay_epochs`` (Hu et al. 2024).  ``one_cycle``
            climbs from 1/25 of the rate to all of it in ``warmup_epochs`` and falls to 1/250000,
            both along a cosine (Smith & Topin 2018, as torch's OneCycleLR); momentum stays.
        milestones: epochs, counted from 0.
        decay: factor.
        decay_epochs: epochs of the fall of ``wsd``.
        momentum: part of the velocity that a step of sgd or lars keeps.
        nesterov: look ahead along the velocity.
        beta1, beta2, epsilon: parameters of adam, adamw and lamb.
        trust: trust coefficient of lars.
        weight_decay: this times a parameter is added to its gradient, or with adamw and lamb to
            its change.
        clip_norm: the gradient of the whole model is scaled down to this Euclidean norm; 0: never
            (and under ``asynchronous``, which has no gradient of the whole model).
        groups: parameters with a rate or a weight decay of their own, each group a table
            ``[[optim.groups]]`` with ``names = ["*.bias"]``, ``lr`` (a factor) and
            ``weight_decay``; ``mpitrain export`` lists the names.
        average: part that each step leaves of a moving average of every parameter, as 0.999; tests,
            exports and torch modules have the averages then.  0: there is none.
    """

    name: Literal["sgd", "adam", "adamw", "lars", "lamb"] = "sgd"
    lr: Positive = 0.05
    reference_batch: Annotated[int, Meta(ge=0)] = 64
    warmup_epochs: NonNegative = 0.0
    schedule: Literal["constant", "cosine", "step", "wsd", "one_cycle"] = "constant"
    milestones: tuple[Count, ...] = ()
    decay: Fraction = 0.1
    decay_epochs: NonNegative = 0.0
    momentum: Momentum = 0.9
    nesterov: bool = False
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    epsilon: Positive = 1e-8
    trust: Positive = 0.001
    weight_decay: NonNegative = 0.0
    clip_norm: NonNegative = 0.0
    groups: tuple[Group, ...] = ()
    average: Momentum = 0.0


class Train(Struct, frozen=True, forbid_unknown_fields=True):
    """[train]

    Attributes:
        epochs: passes over the training samples.
        steps: end after this many steps, even within an epoch; 0: after the epochs.
        batch_size: samples in a step over all ranks; each takes its share of them.
        micro_batches: parts of each replica's share of a batch, which a pipeline works on at the
            same time; without a pipeline, gradients are accumulated over them.
    """

    epochs: Count = 10
    steps: Annotated[int, Meta(ge=0)] = 0
    batch_size: Count = 64
    micro_batches: Count = 1


class Parallel(Struct, frozen=True, forbid_unknown_fields=True):
    """[parallel]

    Attributes:
        pipe: stages of the pipeline.
        tensor: ranks that share each layer (gpt and mlp).
        data: replicas; 0: ranks / (pipe * tensor).
        replicas: number for each stage, if they differ: [2, 1, 1] is PipeDream's 2-1-1.
        partition: how layers become stages: ``even``, equally many layers in each; ``auto``, by
            ``profile``'s measured times; or how many layers each stage has, as in [3, 2].
        profile: file of ``mpitrain profile``.
        schedule: order of work in the pipeline; ``python -m mpitrain schedules`` draws them.
        chunks: pieces of the model on each stage, for ``interleaved``.
        weights: which weights a micro-batch sees under ``asynchronous``.
        window: steps of ``asynchronous`` after which the pipeline drains.
        sequence: tensor ranks share the positions of what lies between their layers too.
        zero: what replicas share among them (ZeRO): 1 optimiser state, 2 gradients too, 3
            parameters too.
        node_shared: parameters and optimiser state once per node, in shared memory.
        offload: folder for the optimiser state, which is then mapped from files there.
        recompute: compute activations again in the backward pass instead of keeping them.
        algorithm: sums the gradients, as ``python -m collectives list`` names it, or one that the
            program registered (``collectives.register``); ``native`` is the MPI library's,
            ``auto`` takes what was measured to be fastest.  With ``zero = 1`` it is one of a
            reduce-scatter; of ``zero`` 2 and 3 and ``node_shared`` it is always ``auto``.
        bucket_bytes: gradients are reduced in pieces of at least this many bytes.
        overlap: reduce a piece while the layers below it are still computing their gradients.
        checksums: on every message of gradients, parameters and activations, so that one that
            arrives changed stops all ranks and is named; a pass over each message at both ends.
    """

    pipe: Count = 1
    tensor: Count = 1
    data: Annotated[int, Meta(ge=0)] = 0
    replicas: tuple[Count, ...] = ()
    partition: Literal["even", "auto"] | tuple[Count, ...] = "even"
    profile: str = ""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "asynchronous"] = "1f1b"
    chunks: Count = 1
    weights: Literal["stash", "vertical", "two_buffers", "spectrain", "linear", "latest"] = "stash"
    window: Count = 64
    sequence: bool = False
    zero: Annotated[int, Meta(ge=0, le=3)] = 0
    node_shared: bool = False
    offload: str = ""
    recompute: bool = False
    algorithm: str = "auto"
    bucket_bytes: Count = 25 * 2**20
    overlap: bool = True
    checksums: bool = False


class Checkpoint(Struct, frozen=True, forbid_unknown_fields=True):
    """[checkpoint]

    Attributes:
        every: steps from one checkpoint to the next; 0: none but the last.
        keep: newest whole ones that are kept, besides the one that the run was resumed from.
            Folders of other names, as ``step-best``, are left alone.
        background: write while training goes on.
        best: besides, the checkpoint of the best test so far is kept, as ``best-00001200``; by
            ``loss`` or a metric, as for ``evaluate.watch``.  Empty: none.
    """

    every: Annotated[int, Meta(ge=0)] = 0
    keep: Count = 2
    background: bool = True
    best: str = ""


class Own(Struct, frozen=True, forbid_unknown_fields=True):
    """[own]

    What the user's own Python brings in the place of what the other tables name, each as
    ``module:name`` or ``file.py:name``, the file as ``data.path`` is found.  Only the commands that
    train and evaluate import it.

    Attributes:
        model: function that makes a torch module or layers, or the module.
        data: function that gives two data sets, to train and to test on: ``len(data)`` pairs
            ``data[i]`` of an input and a label.
        loss: function of torch tensors, outputs and labels: the mean over the samples.
        metrics: such a function, or a dictionary of several.
        optimizer: function that makes an optimiser of torch of a list of parameters.
        cuts: names of modules in the model behind which a pipeline may cut it.
        classes: kinds of labels, where the model does not show them.
    """

    model: str = ""
    data: str = ""
    loss: str = ""
    metrics: str = ""
    optimizer: str = ""
    cuts: tuple[str, ...] = ()
    classes: Annotated[int, Meta(ge=0)] = 0


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """A training job; each attribute is the TOML table of its name."""

    run: Run = Run()
    data: Data = Data()
    model: Model = Model()
    loss: Loss = Loss()
    evaluate: Evaluate = Evaluate()
    optim: Optim = Optim()
    train: Train = Train()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    own: Own = Own()

    def __post_init__(self) -> None:
        for place, value in _values(self):
            if why := _unwritable(value):
                raise ValueError(f"{place}: {why}")
        if not self.run.dir:
            raise ValueError("run.dir: is empty; name a folder, or leave it out")
        if self.optim.warmup_epochs >= self.train.epochs:
            raise ValueError(
                f"optim.warmup_epochs = {self.optim.warmup_epochs:g} must be less than "
                f"train.epochs = {self.train.epochs}"
            )
        for place, why in _conflicts(self):
            raise ValueError(f"{place}: {why}")


def refuse_own(job: Config, command: str) -> None:
    """For commands that describe the other tables, and not what stands in their place.

    Raises:
        ConfigError: the job brings a model or data of its own.
    """
    if job.own.model or job.own.data:
        raise ConfigError(f"own: mpitrain {command} imports nothing; train and eval do")


def _check_algorithm(algorithm: str, zero: int) -> None:
    """Of a job that is to run: a checkpoint can be read without the algorithm of its job."""
    if ".py" in algorithm:
        raise UnknownAlgorithm(
            f"{algorithm!r} is a file, and a checkpoint's job must be readable without it; call "
            "collectives.register in the program that makes the Trainer and give the name here, or "
            "name it in a package's entry point group collectives.algorithms"
        )
    name = named(algorithm)
    if zero != 1:
        return algorithms.check("allreduce", name)
    try:
        algorithms.check("reduce_scatter", name)
    except UnknownAlgorithm as error:
        raise UnknownAlgorithm(
            f"{error}; parallel.zero = 1 sums gradients by a reduce-scatter: take one that it has, "
            "or 'auto', or set zero = 0"
        ) from error


def _values(job: Config) -> Iterator[tuple[str, object]]:
    """All that a job says, as (key, value)."""
    for table in msgspec.structs.fields(job):
        values = getattr(job, table.name)
        for field in msgspec.structs.fields(values):
            yield f"{table.name}.{field.name}", getattr(values, field.name)
    for number, group in enumerate(job.optim.groups):
        for key, value in msgspec.structs.asdict(group).items():
            yield f"optim.groups[{number}].{key}", value


def _unwritable(value: object) -> str:
    """Why a checkpoint could not give a value back, or nothing."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be a finite number, not {value}"
    if isinstance(value, str):
        if "\0" in value:
            return "must not hold the character NUL"
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"is not UTF-8: {value!r}"
    return ""


def _conflicts(job: Config) -> Iterator[tuple[str, str]]:
    """What does not go together, as (key, sentence)."""
    p, m = job.parallel, job.model
    stages = len(p.replicas) or p.pipe
    if p.replicas and (p.pipe not in (1, len(p.replicas)) or p.data):
        yield "parallel.replicas", "gives the stages and their replicas; leave out pipe and data"
    if isinstance(p.partition, tuple) and len(p.partition) != stages * p.chunks:
        yield (
            "parallel.partition",
            f"{len(p.partition)} numbers for {stages} stages of {p.chunks} chunks",
        )
    if p.partition == "auto" and not p.profile:
        yield "parallel.partition", "auto needs parallel.profile, a file of mpitrain profile"
    if p.chunks > 1 and p.schedule != "interleaved":
        yield "parallel.chunks", f"{p.schedule} has one chunk a stage; set schedule = 'interleaved'"
    if p.tensor > 1 and m.kind not in ("gpt", "mlp"):
        yield "parallel.tensor", f"a {m.kind} is not shared by tensor ranks, only gpt and mlp are"
    if p.sequence and m.kind != "gpt":
        yield "parallel.sequence", f"a {m.kind} has no positions to share"
    if m.kind == "gpt" and m.width % m.heads:
        yield "model.heads", f"{m.heads} heads do not divide a width of {m.width}"
    if m.kind == "gpt" and m.heads % p.tensor:
        yield "parallel.tensor", f"{p.tensor} ranks cannot share {m.heads} heads equally"
    if p.sequence and job.data.context % p.tensor:
        yield "parallel.sequence", f"{p.tensor} ranks cannot share {job.data.context} positions"
    if (m.kind == "gpt") != (job.data.name in ("text", "tokens")):
        yield "model.kind", f"a {m.kind} cannot be trained on {job.data.name}"
    if (m.kind == "recommender") != (job.data.name == "clicks"):
        yield "model.kind", f"a {m.kind} cannot be trained on {job.data.name}"
    if job.loss.smoothing and job.loss.name != "cross_entropy":
        yield "loss.smoothing", f"{job.loss.name} has no classes to spread labels over"
    for name in job.evaluate.metrics:
        if why := refusal(name, job.loss.name):
            yield "evaluate.metrics", why
    yield from _schedule_conflicts(job.optim, job.train)
    if p.zero and p.node_shared:
        yield "parallel.node_shared", "shards the optimiser by itself; set zero = 0"
    if len(set(p.replicas)) > 1 and (p.zero or p.node_shared):
        yield "parallel.replicas", "stages of unequal width keep whole replicas; set zero = 0"
    if m.kind == "recommender" and (stages > 1 or p.zero or p.node_shared):
        yield "model.kind", "the recommender's tables are spread over data-parallel ranks alone"
    if p.schedule == "asynchronous":
        if p.zero or p.node_shared or len(set(p.replicas)) > 1:
            yield "parallel.schedule", "asynchronous keeps whole replicas of equal width"
        if job.run.compute != "same" or job.optim.name in ("lars", "lamb"):
            yield "parallel.schedule", "asynchronous has sgd and adam, and one type of number"
        if job.optim.clip_norm:
            yield (
                "optim.clip_norm",
                "asynchronous never has a gradient of the whole model to clip; leave it out, or "
                "set parallel.schedule = '1f1b'",
            )
        if job.optim.groups:
            yield "optim.groups", "asynchronous updates all parameters alike; leave them out"
        if p.weights in ("spectrain", "linear") and job.optim.name != "sgd":
            yield "parallel.weights", f"{p.weights} looks ahead along the velocity of sgd"


def _schedule_conflicts(optim: Optim, train: Train) -> Iterator[tuple[str, str]]:
    """What does not go with the schedule of the learning rate."""
    falling, left = optim.decay_epochs, train.epochs - optim.warmup_epochs
    if optim.schedule == "wsd" and not 0 < falling <= left:
        yield (
            "optim.decay_epochs",
            f"wsd falls in more than 0 and at most {left:g} epochs, which warm-up leaves of "
            f"train.epochs, not {falling:g}",
        )
    if falling and optim.schedule != "wsd":
        yield "optim.decay_epochs", f"{optim.schedule} has no such part; set schedule = 'wsd'"
    if optim.schedule == "one_cycle" and not optim.warmup_epochs:
        yield "optim.warmup_epochs", "one_cycle climbs in these epochs; give 3 of 10, for example"


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a job from a TOML file.

    Args:
        path: the file, or the name of an example (:mod:`mpitrain.examples`).
        overrides: ``table.key=value`` each, applied in turn on top of the file.  Values are
            written as in TOML; what is not TOML is a string, so that ``=ring`` needs no quotes.

    Raises:
        ConfigError: the file cannot be read, or it asks for something that cannot be; the message
            is one sentence with the place as a dotted path.
    """
    try:
        path = examples.find(path)
        with path.open("rb") as file:
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes")
        tables = tomllib.loads(text.decode())
    except RecursionError as error:
        raise ConfigError(f"cannot read the job file {path}: it is nested too deeply") from error
    except (OSError, ValueError) as error:  # not UTF-8, not TOML, or a number of 5000 digits
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read the job file {path}: {reason}") from error
    for override in overrides:
        _apply(tables, override)
    _check_names(tables, Config, ())
    run = tables.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("dir", f"runs/{path.stem}")
    try:
        job = msgspec.convert(tables, Config)
        _check_algorithm(job.parallel.algorithm, job.parallel.zero)
        return _with_data_beside(path, job)
    except (UnknownAlgorithm, ScheduleError) as error:
        raise ConfigError(f"parallel.algorithm: {error}") from error
    except (msgspec.ValidationError, RecursionError) as error:
        reason, _, place = str(error).partition(" - at `$")
        where = place.strip("`").lstrip(".")
        raise ConfigError(f"{where}: {reason}" if where else reason) from error


def _with_data_beside(path: Path, job: Config) -> Config:
    """The job, with ``data.path`` and one's own files beside the job file where they are only
    there."""

    def found(named: str) -> str:
        beside = os.path.join(path.parent, named)
        here = not named or os.path.exists(named) or not os.path.exists(beside)
        return named if here else beside

    own: Any = {}
    for key, value in msgspec.structs.asdict(job.own).items():
        if isinstance(value, str) and ".py:" in value:
            file, _, name = value.rpartition(":")
            own[key] = f"{found(file)}:{name}"
    data = replace(job.data, path=found(job.data.path))
    return replace(job, data=data, own=replace(job.own, **own))


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
    except ValueError:
        table[key] = text.strip()
    except RecursionError as error:
        raise ConfigError(f"{place.strip()}: the value is nested too deeply") from error


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
