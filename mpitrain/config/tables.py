"""The tables of a job file and their keys."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from mpitrain.config.federated import Federated
from mpitrain.config.numbers import (
    Count,
    Counts,
    Fraction,
    NonNegative,
    Part,
    Positive,
    ReadBy,
    Seed,
    Whole,
)
from mpitrain.config.server import Server
from mpitrain.config.sync import Compress, Sync


class ConfigError(ValueError):
    """The job asks for something that does not exist or cannot be.

    A program that does not catch it ends with ``exit_status``; rank 0 writes the text and the line
    of the program, without a traceback.
    """

    exit_status = 2


class SettingError(ConfigError, TypeError):
    """A keyword of a program is no setting of a job."""


class Run(Struct, frozen=True, forbid_unknown_fields=True):
    """[run]

    Attributes:
        seed: seed of the initial parameters and of the order of samples.
        random: random numbers of a torch module: ``keyed``, by seed, step, place and sample, so
            that every layout has one process's numbers; ``local``, those that torch draws on each
            rank, from a seed of the step and the micro-batch: masks depend on the layout.
        dtype: type of parameters, gradients and optimiser state.
        compute: type of activations and of the parameters that layers see; 16-bit types keep the
            parameters themselves in ``dtype``.
        device: processor that computes: ``cpu``; ``cuda``, a GPU for each rank, by CuPy; ``auto``,
            GPUs if all ranks have one that works.
        loss_scale: scale of the loss in the first step, for ``compute = "float16"``; it is halved
            when a gradient overflows and doubled after ``loss_scale_window`` steps without.
        loss_scale_window: steps without an overflow after which the loss scale is doubled.
        on_nonfinite: reaction of all ranks to a loss or a gradient that is not finite: ``stop``, or
            ``skip`` the update.
        on_spike: what all ranks do after a loss that is far above those before, or is not finite,
            unless ``on_nonfinite`` skips it: ``go_on``; else they go back to the newest checkpoint
            before it, and ``repeat`` the same batches, ``skip`` those of the spike, or ``skip_all``
            since the checkpoint.  Batches that are left out count as steps, and change nothing.
        spike_factor: a loss above this many times the median of the ``spike_window`` losses before
            it is far above them, unless that is 0.
        spike_window: losses whose median is taken; before there are as many, none is a spike.
        spike_steps: losses in a row, far above, that make a spike; none of its steps is saved.
        spike_times: times that a run goes back; the next spike ends it.
        dir: folder for metrics and checkpoints of one job at a time; an earlier run's metrics are
            moved to ``metrics.earlier.jsonl``, its trace is removed, and its checkpoints are moved
            to ``checkpoints/earlier``, unless it is resumed.  When a job file leaves it out: the
            file's name without its suffix, under ``runs/``.
        shadow: first steps in which a few samples of the batch also go through a torch module in
            plain torch, on rank 0; another loss, gradient or update is an error; 0: none.
        log_every: steps from one console line to the next.
        mfu: measure at the start what all ranks reach in products of matrices, for half a second,
            and show the utilisation of it on the console: 6 operations for each trained parameter
            and token; for samples of tokens.
        noise_scale: record in each step the squared norm of the true gradient and the variance of
            a sample's, by the gradients of the micro-batches, and their ratio, the critical batch
            (McCandlish et al. 2018).
        check_every: steps from one comparison of the replicas to the next; 0: after epochs only.
        records: where the numbers of steps and tests go besides ``metrics.jsonl``: ``csv``
            (``metrics.csv``), ``tensorboard``, ``wandb`` and ``mlflow``, all in ``dir`` unless
            WANDB_MODE or MLFLOW_TRACKING_URI is set; each but csv is an extra of that name.
        trace: write ``trace.json``, the work of each rank over time, for Perfetto or
            chrome://tracing.
    """

    seed: Seed = 0
    random: Literal["keyed", "local"] = "keyed"
    dtype: Literal["float32", "float64"] = "float32"
    compute: Literal["same", "float16", "bfloat16"] = "same"
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    loss_scale: Annotated[Positive, ReadBy("compute", "float16")] = 65536.0
    loss_scale_window: Annotated[Count, ReadBy("compute", "float16")] = 2000
    on_nonfinite: Literal["stop", "skip"] = "stop"
    on_spike: Literal["go_on", "repeat", "skip", "skip_all"] = "go_on"
    spike_factor: Annotated[float, Meta(gt=1), ReadBy("on_spike")] = 3.0
    spike_window: Annotated[Count, ReadBy("on_spike")] = 32
    spike_steps: Annotated[Count, ReadBy("on_spike")] = 1
    spike_times: Annotated[Count, ReadBy("on_spike")] = 3
    dir: str = "runs/unnamed"
    shadow: Annotated[int, Meta(ge=0)] = 8
    log_every: Count = 10
    mfu: bool = False
    noise_scale: bool = False
    check_every: Annotated[int, Meta(ge=0)] = 0
    records: tuple[Literal["csv", "tensorboard", "wandb", "mlflow"], ...] = ()
    trace: bool = False


class Data(Struct, frozen=True, forbid_unknown_fields=True):
    """[data]

    Attributes:
        name: ``digits`` is scikit-learn's 1797 scans of handwritten digits, 8x8 points each;
            ``idx`` a folder of MNIST's files; ``arrays`` an ``.npz`` file, or a folder of ``.npy``
            files, of ``inputs`` and ``labels``; ``text`` a text file, ``tokens`` a folder of
            ``train.bin`` and ``val.bin`` (uint16), both for language models; ``clicks`` drawn
            choices of users, for the recommender.
        path: file or folder, relative to where the job starts or, if there is none, to the job
            file.  Parts of it are read while the job trains: replace it by a new file of its name,
            because a rank that reads beyond the end of a file that was cut off is killed (SIGBUS).
        units: what a token of a text is: one character, or one byte.
        context: positions of a sample of text.
        vocabulary: number of tokens in ``tokens``; 0: found in the data.
        samples: samples of ``clicks``.
        tables: embedding tables, one for each feature of a sample of ``clicks``.
        rows: rows of each table: values that a feature can take.
        test_fraction: part of the samples that is kept for the test.
        workers: processes of each rank that read samples ahead of the steps, where a step waits
            for them; 0: none.  The order of the samples is the same for any number.
    """

    name: Literal["digits", "idx", "arrays", "text", "tokens", "clicks"] = "digits"
    path: Annotated[str, ReadBy("name", "idx", "arrays", "text", "tokens")] = ""
    units: Annotated[Literal["characters", "bytes"], ReadBy("name", "text")] = "characters"
    context: Annotated[Count, ReadBy("name", "text", "tokens")] = 64
    vocabulary: Annotated[int, Meta(ge=0), ReadBy("name", "tokens")] = 0
    samples: Annotated[Count, ReadBy("name", "clicks")] = 4096
    tables: Annotated[Count, ReadBy("name", "clicks")] = 8
    rows: Annotated[Count, ReadBy("name", "clicks")] = 1000
    test_fraction: Annotated[Fraction, ReadBy("name", "digits", "arrays", "text", "clicks")] = 0.2
    workers: Annotated[int, Meta(ge=0, le=256)] = 0


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """[model]

    Attributes:
        kind: ``mlp``: linear layers.  ``convnet``: blocks of 3x3 convolution, ReLU and 2x2 max
            pooling, then linear layers.  ``vgg``: a convnet with two convolutions in each block.
            ``resnet``: residual blocks with group norm, then a mean over the image.  ``gpt``: a
            decoder-only transformer with tied embeddings.  ``recommender``: embedding tables,
            spread over the data-parallel ranks, then linear layers.
        hidden: widths of the linear layers before the last one.
        channels: output channels of each block of a convnet.
        layers: blocks of the gpt.
        heads: heads of its attention; their number must divide ``width``.
        width: features of a position, or of a row of an embedding table.
        dropout: probability with which a position of the gpt does not see another one in training;
            every layout drops the same.
        experts: perceptrons in the place of each perceptron of the gpt; a router chooses ``top`` of
            them for each position.  0: one for all positions, without a router.
        top: experts that a position goes through.
        capacity: an expert takes at most ``ceil(capacity * top * context / experts)`` rows of a
            sample, the first ones by position; others are dropped.  A sample's drops are the same
            in every layout.  0: nothing is dropped.
        balance: factor of the loss that spreads the positions of a sample over the experts evenly:
            ``experts`` times the sum over the experts of (part of the choices x mean probability).
            Losses of steps contain it, those of tests do not.
        router_z: factor of the loss that keeps the router's scores small: the mean of
            ``logsumexp(scores)^2`` over the positions.
    """

    kind: Literal["mlp", "convnet", "vgg", "resnet", "gpt", "recommender"] = "convnet"
    hidden: Annotated[Counts, ReadBy("kind", "mlp", "convnet", "vgg", "recommender")] = (64,)
    channels: Annotated[Counts, ReadBy("kind", "convnet", "vgg", "resnet")] = (16, 32)
    layers: Annotated[Count, ReadBy("kind", "gpt")] = 4
    heads: Annotated[Count, ReadBy("kind", "gpt")] = 4
    width: Annotated[Count, ReadBy("kind", "gpt", "recommender")] = 64
    dropout: Annotated[Part, ReadBy("kind", "gpt")] = 0.0
    experts: Annotated[int, Meta(ge=0), ReadBy("kind", "gpt")] = 0
    top: Annotated[Count, ReadBy("experts")] = 2
    capacity: Annotated[NonNegative, ReadBy("experts")] = 1.25
    balance: Annotated[NonNegative, ReadBy("experts")] = 0.01
    router_z: Annotated[NonNegative, ReadBy("experts")] = 0.001


class Loss(Struct, frozen=True, forbid_unknown_fields=True):
    """[loss]

    Attributes:
        name: ``cross_entropy`` of classes, labels being integers; ``mean_squared_error`` of
            numbers; ``binary_cross_entropy`` of numbers that are 0 or 1, or probabilities.
        smoothing: part of each label that cross_entropy spreads evenly over the classes.
        ignore_index: labels of this value do not count in cross_entropy and its metrics, as -100
            for padding: the loss is the mean over the others.
    """

    name: Literal["cross_entropy", "mean_squared_error", "binary_cross_entropy"] = "cross_entropy"
    smoothing: Annotated[Part, ReadBy("name", "cross_entropy")] = 0.0
    ignore_index: Annotated[int | Literal["none"], ReadBy("name", "cross_entropy")] = "none"

    @property
    def ignored(self) -> int | None:
        """The value of labels that do not count; None if all count."""
        return None if self.ignore_index == "none" else int(self.ignore_index)


class Evaluate(Struct, frozen=True, forbid_unknown_fields=True):
    """[evaluate]

    Attributes:
        metrics: measures of a test besides the loss: for classes ``accuracy``, ``top5`` (or another
            number), ``f1`` (mean over the classes), ``perplexity``; for numbers ``mae``, ``rmse``.
            When left out, ``accuracy`` or ``mae``.
        every: epochs from one test to the next; there is one at the end in any case.
        patience: tests in a row without a new best one after which training ends; 0: never.
        watch: value by which tests are compared, for ``patience`` and for a scheduler that follows
            tests, ``loss`` or a metric.  A metric of your own needs its direction for ``patience``:
            ``higher score`` or ``lower score``.
    """

    metrics: tuple[str, ...] = ()
    every: Count = 1
    patience: Annotated[int, Meta(ge=0)] = 0
    watch: str = "loss"


class Group(Struct, frozen=True, forbid_unknown_fields=True):
    """An element of ``optim.groups``.

    Attributes:
        names: patterns of parameters' names, as ``*.bias``; a parameter belongs to the first group
            with a pattern that matches.
        lr: factor on the learning rate.
        weight_decay: their weight decay; when left out, that of the [optim] table.
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
        warmup_epochs: epochs in which the rate climbs in a line from ``lr`` to the scaled one (from
            0 if that is no larger).
        warmup_steps: the same in steps, in the place of ``warmup_epochs``.
        schedule: rate after that, up to the run's last step.  ``cosine`` and ``linear`` fall to 0
            there, as torch's CosineAnnealingLR and transformers' linear do, ``step`` multiplies it
            by ``decay`` at each epoch of ``milestones``, ``wsd`` is constant and falls to 0 in a
            line in the last ``decay_epochs`` (Hu et al. 2024).  ``one_cycle`` climbs from 1/25 of
            the rate to all of it in the warm-up and falls to 1/250000, both along a cosine (Smith &
            Topin 2018, as torch's OneCycleLR); momentum stays.
        schedule_by: unit in which a schedule of your own counts, ``step`` or ``epoch`` (one value
            for all steps of an epoch).
        milestones: epochs of ``step``, counted from 0.
        decay: factor of ``step``.
        decay_epochs: epochs of the fall of ``wsd``.
        momentum: part of the velocity that a step of sgd or lars keeps.
        nesterov: look ahead along the velocity.
        beta1, beta2, epsilon: parameters of adam, adamw and lamb.
        trust: trust coefficient of lars.
        weight_decay: this number times the parameter is added to its gradient; with adamw and lamb,
            to its update.
        clip_norm: largest Euclidean norm of the gradient of the whole model, which is scaled down
            to it; 0: no limit.
        clip_value: largest absolute value of each number of the gradient that an update takes,
            after ``clip_norm``, as torch's clip_grad_value_; 0: no limit.
        groups: parameters with a rate or a weight decay of their own, each group a table
            ``[[optim.groups]]`` with ``names = ["*.bias"]``, ``lr`` (a factor) and
            ``weight_decay``; ``mpitrain export`` lists the names.
        average: part of a moving average of every parameter that a step keeps, as 0.999; tests,
            exports and torch modules use the averages.  0: no average.
    """

    name: Literal["sgd", "adam", "adamw", "lars", "lamb"] = "sgd"
    lr: Positive = 0.05
    reference_batch: Annotated[int, Meta(ge=0)] = 64
    warmup_epochs: NonNegative = 0.0
    warmup_steps: Whole = 0
    schedule: Literal["constant", "cosine", "linear", "step", "wsd", "one_cycle"] = "constant"
    schedule_by: Literal["step", "epoch"] = "step"
    milestones: Annotated[Counts, ReadBy("schedule", "step")] = ()
    decay: Annotated[Fraction, ReadBy("schedule", "step")] = 0.1
    decay_epochs: Annotated[NonNegative, ReadBy("schedule", "wsd")] = 0.0
    momentum: Annotated[Part, ReadBy("name", "sgd", "lars")] = 0.9
    nesterov: Annotated[bool, ReadBy("name", "sgd")] = False
    beta1: Annotated[Part, ReadBy("name", "adam", "adamw", "lamb")] = 0.9
    beta2: Annotated[Part, ReadBy("name", "adam", "adamw", "lamb")] = 0.999
    epsilon: Annotated[Positive, ReadBy("name", "adam", "adamw", "lamb")] = 1e-8
    trust: Annotated[Positive, ReadBy("name", "lars")] = 0.001
    weight_decay: Annotated[NonNegative, ReadBy("name", "sgd", "adam", "adamw", "lars", "lamb")] = (
        0.0
    )
    clip_norm: NonNegative = 0.0
    clip_value: NonNegative = 0.0
    groups: tuple[Group, ...] = ()
    average: Part = 0.0

    @property
    def constant(self) -> "Optim":
        """This table with one rate for all steps, for a job that gives them others, no average."""
        return replace(
            self, schedule="constant", schedule_by="step", milestones=(), decay=0.1,
            warmup_epochs=0.0, warmup_steps=0, decay_epochs=0.0, average=0.0,
        )  # fmt: skip


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


#: Schedules of a pipeline, with their virtual stages dealt round and round, or in a V.
Looping = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "asynchronous"]
InV = Literal["zb_v", "dualpipe_v", "v_half", "v_min"]


class Parallel(Struct, frozen=True, forbid_unknown_fields=True):
    """[parallel]

    Attributes:
        pipe: stages of the pipeline.
        tensor: ranks that share each layer; embedding tables of a recommender are spread instead.
        experts: replicas that have a share of ``model.experts`` each, and send one another the
            rows of their samples; their number divides that of replicas, in which each of
            ``context``'s ranks counts.  1: each replica has all experts.
        alltoall: algorithm that sends these rows, by its name in ``python -m collectives list``;
            ``native`` is the MPI library's, ``auto`` takes what was measured to be fastest.
        data: replicas; 0: ranks / (pipe * context * space * tensor).
        replicas: replicas of each stage, if they differ: [2, 1, 1] is PipeDream's 2-1-1.
        partition: way to cut the layers into stages: ``even``, equally many layers in each;
            ``auto``, by ``profile``'s measured times; or the number of layers of each stage, as in
            [3, 2].  ``auto`` with ``links`` and without ``pipe``, ``replicas`` and ``data`` finds
            the stages and their replicas, too (PipeDream); a run that goes on keeps them.
        profile: file of ``mpitrain profile``.
        links: bandwidths for ``auto`` in GB/s, between ranks of a node and between nodes, as
            [10, 1.25]; one number: alike.  ``collectives fit`` measures them.
        schedule: order of work in the pipeline; ``python -m mpitrain schedules`` draws them.
        chunks: pieces of the model on each stage, for ``interleaved``; the schedules in a V have 2.
        weights: weights that both passes of a micro-batch see under ``asynchronous``: the newest
            of its forward pass (``stash``), as the first stage saw (``vertical``), or of the batch
            before (``two_buffers``).  Others take the newest backward, and forward a prediction by
            velocity (``spectrain``) or last change (``linear``), or the newest, too (``latest``).
        window: steps of ``asynchronous`` after which the pipeline drains; checkpoints, comparisons
            and stops that are due within a window come at its end.
        context: ranks that share the positions of each sample, for long ones (gpt).
        space: ranks that share the rows of each image, for large ones (convnet, vgg, resnet, and
            layers of mpitrain).
        attention: way in which context ranks attend to all positions.  ``zigzag`` and ``ring``:
            keys and values go round; each rank has two pieces of the positions, an early one and a
            late one, which makes causal attention equal work, or one piece.  ``ulysses``: ranks
            exchange positions for heads, of which there should be as many.
        sequence: tensor ranks share the positions of what lies between their layers too.
        zero: ZeRO level, which says what the replicas share among them: 1 the optimiser state, 2
            gradients too, 3 parameters too.
        prefetch: gather the parameters of the next layer while a layer is computed, forward and
            backward; the numbers are the same, and two layers are whole at a time, not one.
        offload: folder for the optimiser state, and with ``zero = 3`` for the shards of parameters
            and gradients, which are then mapped from files there.
        recompute: compute activations again in the backward pass instead of keeping them.
        algorithm: algorithm that sums the gradients, by its name in ``python -m collectives list``
            or as the program registered it (``collectives.register``); ``native`` is the MPI
            library's, ``auto`` takes what was measured to be fastest.  ``zero = 1`` needs a
            reduce-scatter; ``zero`` 2 and 3 need ``auto``.
        bucket_bytes: gradients are reduced in pieces of at least this many bytes.
        overlap: reduce a piece while the layers below it are still computing their gradients.  The
            numbers are the same; ``zero`` 2 and 3 always overlap.
        checksums: checksum on every message of gradients, parameters and activations: a message
            that arrives changed stops all ranks, with its name.  Costs a pass over each message at
            both ends.
    """

    pipe: Count = 1
    tensor: Count = 1
    experts: Count = 1
    alltoall: Annotated[str, ReadBy("experts")] = "auto"
    data: Annotated[int, Meta(ge=0)] = 0
    replicas: Counts = ()
    partition: Literal["even", "auto"] | Counts = "even"
    profile: Annotated[str, ReadBy("partition", "auto")] = ""
    links: Annotated[tuple[Positive, ...], Meta(max_length=2), ReadBy("partition", "auto")] = ()
    schedule: Looping | InV = "1f1b"
    chunks: Count = 1
    weights: Annotated[
        Literal["stash", "vertical", "two_buffers", "spectrain", "linear", "latest"],
        ReadBy("schedule", "asynchronous"),
    ] = "stash"
    window: Annotated[Count, ReadBy("schedule", "asynchronous")] = 64
    context: Count = 1
    space: Count = 1
    attention: Annotated[Literal["zigzag", "ring", "ulysses"], ReadBy("context")] = "zigzag"
    sequence: bool = False
    zero: Annotated[int, Meta(ge=0, le=3)] = 0
    prefetch: Annotated[bool, ReadBy("zero", 3)] = True
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
        best: value by which the checkpoint of the best test is kept, too, as ``best-00001200``:
            ``loss`` or a metric, as for ``evaluate.watch``.  Empty: none is kept.
        mtbf: mean hours between failures of the job, by which the summary advises on ``every``
            (Young 1974); 0: no advice.
    """

    every: Annotated[int, Meta(ge=0)] = 0
    keep: Count = 2
    background: bool = True
    best: str = ""
    mtbf: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class Own(Struct, frozen=True, forbid_unknown_fields=True):
    """[own]

    The user's own Python in the place of what the other tables name, each as
    ``module:name`` or ``file.py:name``, the file as ``data.path`` is found.  Only the commands that
    train and evaluate import it.

    Attributes:
        model: function that makes a torch module or layers, or the module.
        data: function that gives two data sets, to train and to test on: ``len(data)`` pairs
            ``data[i]`` of an input and a label; the second may be None: nothing is tested.
        loss: function of torch tensors, outputs and labels: the mean over the samples, or the sum
            of what counts and its number.
        metrics: function as for ``loss``, or a dictionary of several.
        optimizer: function that makes an optimiser of torch of a list of parameters.
        schedule: function that makes a scheduler of torch of that optimiser, or gives the factor on
            the rate of a step.
        cuts: names of modules in the model behind which a pipeline may cut it, or the name of a
            list of modules.
        splits: with ``parallel.tensor``, how the ranks share matrices of a torch module, by names
            or their ends: ``columns``, ``columns of 3`` where three lie side by side, ``rows``, or
            ``number`` for an attribute that counts what is shared.
        classes: number of classes of the labels, where the model does not show it.
        clients: the client of each training sample, or a function of the data set that gives them,
            for ``split = "own"`` of [federated] or [sync]; an array in a file as
            ``patients.npz:hospital``.
    """

    model: str = ""
    data: str = ""
    loss: str = ""
    metrics: str = ""
    optimizer: str = ""
    schedule: str = ""
    cuts: str | tuple[str, ...] = ()
    splits: dict[str, str] = {}
    classes: Annotated[int, Meta(ge=0), ReadBy("data")] = 0
    clients: str = ""


class Tables(Struct, frozen=True, forbid_unknown_fields=True):
    """The tables of a job file, whatever they say together."""

    run: Run = Run()
    data: Data = Data()
    model: Model = Model()
    loss: Loss = Loss()
    evaluate: Evaluate = Evaluate()
    optim: Optim = Optim()
    train: Train = Train()
    parallel: Parallel = Parallel()
    compress: Compress = Compress()
    sync: Sync = Sync()
    checkpoint: Checkpoint = Checkpoint()
    own: Own = Own()
    server: Server = Server()
    federated: Federated = Federated()

    @property
    def stages(self) -> int:
        """Stages of the pipeline; 1 without one."""
        return len(self.parallel.replicas) or self.parallel.pipe

    def width(self, ranks: int) -> int:
        """Replicas of each stage on so many ranks, where all stages have as many."""
        p = self.parallel
        return p.data or max(1, ranks // (p.pipe * p.context * p.space * p.tensor))

    def needed(self, ranks: int) -> int:
        """Number of ranks that the layout has on so many ranks, which it must have all of."""
        p = self.parallel
        each = sum(p.replicas) or self.width(ranks) * p.pipe
        return each * p.context * p.space * p.tensor

    @property
    def passes(self) -> int:
        """Epochs of the rate's schedule, or rounds if there are clients."""
        return self.federated.rounds if self.federated.clients else self.train.epochs


def by_key(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Values of a job by table and key, as in ``optim.lr``."""
    return {f"{name}.{key}": value for name, keys in tables.items() for key, value in keys.items()}
