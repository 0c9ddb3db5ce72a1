"""The methods of training: what each needs, and what it does not offer to others.

Two methods go together if neither needs something that the other does not offer.
:mod:`mpitrain.config.conflicts` reads the table; ``mpitrain methods`` shows it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitrain import extras
from mpitrain.config.tables import Tables


@dataclass(frozen=True)
class Method:
    """A method of training: a row of the table.

    Attributes:
        name: its name on the command line.
        title: its name in a sentence, in the singular.
        sets: keys that choose it, each with a value; none if only a caller knows that it is used.
        needs: features that it needs from the other methods of the job.
        lacks: features that it does not offer to others, each with a verb phrase that says why.
        used: whether a job uses it; by default, if its first key is not at its default.
        beside: further keys of a job that has this method alone.
        instead: the way to do without it; by default, its first key at its default.
    """

    name: str
    title: str
    sets: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)
    used: Callable[[Tables], bool] | None = None
    beside: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    instead: str = field(default="", kw_only=True)


def _codec(feature: str) -> Callable[[Tables], bool]:
    """Whether a job has a codec with this feature (:func:`mpitrain.config.codecs.features`)."""
    return lambda job: job.compress.codec != "none" and feature in extras.features(job)


def _is(table: str, key: str, *values: Any) -> Callable[[Tables], bool]:
    return lambda job: getattr(getattr(job, table), key) in values


def _model(*kinds: str) -> Callable[[Tables], bool]:
    return lambda job: not job.own.model and job.model.kind in kinds


def _optimizer(*names: str) -> Callable[[Tables], bool]:
    return lambda job: not job.own.optimizer and job.optim.name in names


def _weights(*policies: str) -> Callable[[Tables], bool]:
    return lambda job: job.parallel.schedule == "asynchronous" and job.parallel.weights in policies


#: Features that methods need; each text is the object of the verb "needs".
ALIKE = "the same rule for all parameters"
BATCH_GRADIENT = "the gradient of a whole batch in each update"
CHECKED = "messages that can carry checksums"
CLOCK = "to say when parameters are exchanged"
CODED = "sums of gradients that can be coded"
DEATHS = "ranks that see one another die"
DELAYED = "messages that can be delayed"
ELEMENTWISE = "a codec of single numbers"
EXACT = "the sum of gradients as they are"
EXCHANGE = "exchanges of all workers together"
FEW_ROWS = "a model of which a sample changes a few rows"
FORWARD = "forward passes of all workers together"
FORWARD_WEIGHTS = "the weights of the forward pass in the backward pass"
GRADIENT = "the gradients of a whole step at one time"
HOST = "arrays in the host's memory"
JOB_MODEL = "a model and data that the job file describes"
LOSS_SCALE = "one loss scale for all gradients of a sum"
MEMORY = "the optimiser state in memory"
NO_MOMENTUM = "an optimiser without momentum"
NO_RESIDUAL = "a codec that keeps no residual"
ONE_RANK = "a whole model on one rank"
ONE_SUM = "one sum of whole tensors in a step"
ONE_TYPE = "one type of number"
POSITIONS = "layers that work position by position"
READS = "samples that the rank reads itself"
REPLICAS = "replicas of the same parameters"
REPLICATED = "a copy of every parameter on each replica"
REPLICA_STATE = "all parameters and optimiser state on each replica"
REPLICA_SUMS = "gradients that are summed over the replicas alone"
ROWS = "layers that can share the rows of images"
RULES = "an optimiser of the [optim] table"
SHAREABLE = "layers that tensor ranks can share"
SIZES = "an exchange that scales what it sums"
SKIPPING = "steps that all ranks can skip together"
SOME_ROWS = "updates that change a sample's rows alone"
STATE_PLACE = "to say where the optimiser state lies"
STEPS = "steps that all ranks take together"
VELOCITY = "the velocity of sgd"
WHOLE_SUM = "the whole sum on each rank"
WORKER_GRADIENTS = "the gradient of a worker on each of its ranks"
WIDTHS = "equally many replicas of each stage"

#: The model and the optimiser of a job that tries methods, unless these set others.
BASE = {"model.kind": "mlp", "optim.momentum": 0.0}
_IMAGES = {"model.kind": "convnet"}
_GPT = {"model.kind": "gpt", "data.name": "text", "data.path": "text.txt"}
_CLICKS = {"model.kind": "recommender", "data.name": "clicks"}
_STALE = {"parallel.schedule": "asynchronous"}

# fmt: off
_ALL_ROWS = "moves each parameter in each step"
_SHARDS = {REPLICA_STATE: "shares them among the replicas", WHOLE_SUM: "gives each a shard of it",
           STATE_PLACE: "shares it among the replicas"}
_SHARD_SUMS = (ELEMENTWISE, NO_RESIDUAL)
_LAYOUT = (
    Method("pipe", "a pipeline", {"parallel.pipe": 2}, (),
           {ONE_RANK: "gives each rank some of the layers"}, lambda job: job.stages > 1),
    Method("unequal", "a pipeline of unequal stages", {"parallel.replicas": (2, 1)}, (),
           {WIDTHS: "has more of some"},
           lambda job: len(set(job.parallel.replicas)) > 1),
    Method("tensor", "tensor parallelism", {"parallel.tensor": 2}, (SHAREABLE,),
           {ONE_RANK: "gives each rank a part of each layer",
            REPLICA_SUMS: "sums some over the tensor ranks, too"}),
    Method("sequence", "sequence parallelism", {"parallel.sequence": True}, (POSITIONS,),
           beside=_GPT),
    Method("context", "context parallelism", {"parallel.context": 2}, (POSITIONS, HOST),
           {ONE_RANK: "gives each rank some of the positions",
            REPLICA_SUMS: "sums them over the context ranks, too",
            WORKER_GRADIENTS: "gives each rank a part of it"}, beside=_GPT),
    Method("space", "spatial parallelism", {"parallel.space": 2}, (ROWS,),
           {ONE_RANK: "gives each rank some of the rows",
            REPLICA_SUMS: "sums them over the ranks of an image, too",
            WORKER_GRADIENTS: "gives each rank a part of it"}, beside=_IMAGES),
    Method("expert-parallel", "expert parallelism",
           {"parallel.experts": 2, "model.experts": 3} | _GPT, (FORWARD, WIDTHS),
           {REPLICATED: "spreads experts over the replicas",
            REPLICA_SUMS: "keeps those of an expert on some replicas"}),
    Method("zero-1", "ZeRO-1", {"parallel.zero": 1}, (STATE_PLACE,), _SHARDS,
           _is("parallel", "zero", 1)),
    *(Method(f"zero-{level}", f"ZeRO-{level}", {"parallel.zero": level},
             (STATE_PLACE, *_SHARD_SUMS),
             _SHARDS | {ONE_SUM: "sums the shards of each micro-batch"},
             _is("parallel", "zero", level)) for level in (2, 3)),
    Method("offload", "optimiser state in files", {"parallel.offload": "state"}, (HOST,),
           {MEMORY: "maps it from files"}),
    Method("recompute", "recomputation of activations", {"parallel.recompute": True},
           (FORWARD_WEIGHTS,)),
    Method("checksums", "a checksum of each message", {"parallel.checksums": True}, (CHECKED,),
           {DELAYED: "has checks that are not"}),
    Method("asynchronous", "an asynchronous schedule", _STALE,
           (REPLICA_STATE, CLOCK, ONE_TYPE, CODED),
           {CLOCK: "exchanges them after each micro-batch", CODED: "sends them as they are",
            EXCHANGE: "lets each stage update by itself",
            GRADIENT: "has several steps under way", SKIPPING: "has several under way"},
           _is("parallel", "schedule", "asynchronous")),
    Method("prediction", "weight prediction", {"parallel.weights": "spectrain"}, (VELOCITY, ALIKE),
           {FORWARD_WEIGHTS: "has later ones there"}, _weights("spectrain", "linear"),
           beside=_STALE),
    Method("latest", "parallel.weights = 'latest'", {"parallel.weights": "latest"}, (),
           {FORWARD_WEIGHTS: "has later ones there"},
           _weights("latest"), beside=_STALE),
)

_CODECS = (
    Method("codec", "a codec", {"compress.codec": "bf16"}, (HOST, CODED),
           {EXACT: "sums what it has coded"}),
    Method("residual", "a codec with a residual", {"compress.codec": "int8"}, (),
           {NO_RESIDUAL: "adds what it leaves out to the next gradient"}, _codec("residual"),
           instead="take an unbiased codec, as int8:rounding=stochastic, or set "
                   "compress.feedback = 'off'"),
    Method("linear", "a codec whose codes add up", {"compress.codec": "powersgd"}, (),
           {ELEMENTWISE: "codes whole matrices"}, _codec("linear")),
    Method("sparse", "a codec of few elements", {"compress.codec": "topk"}, (),
           {ELEMENTWISE: "chooses elements of whole matrices"}, _codec("sparse")),
    Method("pruned-ring", "a ring that prunes",
           {"compress.codec": "topk", "compress.sparse": "pruned_ring"},
           used=_is("compress", "sparse", "pruned_ring")),
    Method("memory", "a codec with a memory", {"compress.codec": "signum"}, (),
           {ELEMENTWISE: "remembers whole gradients"}, _codec("memory")),
    Method("momentum-codec", "a codec that has the momentum", {"compress.codec": "dgc"},
           (NO_MOMENTUM,), used=_codec("momentum")),
    Method("clip-codec", "a codec that clips", {"compress.codec": "dgc:clip=1"},
           (ONE_RANK, REPLICATED), used=_codec("clips")),
    Method("vote", "a codec that votes", {"compress.codec": "signum"},
           (WHOLE_SUM, REPLICA_SUMS, SIZES), used=_codec("votes")),
)

_WORKERS = (REPLICA_STATE, REPLICATED, WIDTHS, CLOCK, HOST, WORKER_GRADIENTS)
_DRIFTS = {CLOCK: "exchanges them after several steps", FORWARD: "lets workers train by themselves"}
_AS_IT_IS = {SIZES: "adds the sum to the weights as it is"}
_SYNC = (
    Method("local", "local SGD", {"sync.kind": "local"}, _WORKERS, _DRIFTS | _AS_IT_IS,
           lambda job: job.sync.kind == "local" and job.sync.outer == "plain"),
    Method("diloco", "local SGD with an outer optimiser",
           {"sync.kind": "local", "sync.outer": "momentum:lr=0.001,momentum=0"}, _WORKERS, _DRIFTS,
           lambda job: job.sync.kind == "local" and job.sync.outer != "plain"),
    Method("delayed", "delayed averaging", {"sync.kind": "delayed"}, _WORKERS,
           _DRIFTS | _AS_IT_IS | {EXCHANGE: "adds means to what workers have done meanwhile"},
           _is("sync", "kind", "delayed")),
    Method("late", "a delay beyond the period",
           {"sync.kind": "delayed", "sync.delay": 3, "sync.period": 2}, (),
           {CODED: "begins an exchange before the last one's residual is known"},
           lambda job: job.sync.kind == "delayed" and job.sync.delay > job.sync.period,
           instead="set sync.delay to at most sync.period"),
    Method("own-samples", "a worker with samples of its own", {"sync.split": "iid"},
           (STEPS, WIDTHS)),
    Method("adasum", "adasum", {"sync.combine": "adasum"},
           (EXCHANGE, ONE_SUM, REPLICA_SUMS, REPLICATED, WIDTHS, HOST),
           {CODED: "is no sum", EXACT: "is no sum"}),
    Method("agree", "sync.agree above 1", {"sync.agree": 2}, (),
           {SKIPPING: "tells the ranks of a step later"},
           lambda job: job.sync.drifts and job.sync.agree > 1, beside={"sync.kind": "local"}),
)

_WHOLE_WORKERS = (ONE_RANK, REPLICA_STATE, CLOCK, HOST, MEMORY)
_SERVERS = (
    Method("server", "a parameter server", {"server.ranks": 1},
           (ONE_RANK, REPLICA_STATE, CLOCK, HOST, REPLICATED, RULES, *_SHARD_SUMS),
           {BATCH_GRADIENT: "may take each worker's by itself",
            CHECKED: "has messages without", CLOCK: "serves each worker when it asks",
            DEATHS: "waits for workers one by one", DELAYED: "has messages that are not",
            EXCHANGE: "takes each gradient by itself", FORWARD: "lets workers be ahead of others",
            GRADIENT: "has a part of each tensor", REPLICAS: "lets workers be ahead of others",
            SKIPPING: "never skips one", STEPS: "lets workers be ahead of others"}),
    Method("predict", "correct = 'predict'", {"server.correct": "predict"}, (VELOCITY, ALIKE),
           used=_is("server", "correct", "predict"),
           beside={"server.ranks": 1, "optim.momentum": 0.9}),
    Method("hogwild", "hogwild", {"server.hogwild": True},
           (*_WHOLE_WORKERS, FEW_ROWS, SOME_ROWS, CODED),
           {BATCH_GRADIENT: "takes each rank's by itself",
            CLOCK: "updates one copy at any time", CODED: "sends none",
            DEATHS: "has ranks in one memory", DELAYED: "sends none",
            EXCHANGE: "exchanges nothing", FORWARD: "lets each rank train by itself",
            REPLICAS: "has one copy", SKIPPING: "never skips one",
            STEPS: "lets each rank train by itself"}, beside=_CLICKS),
    Method("clients", "a federated client", {"federated.clients": 4},
           (*_WHOLE_WORKERS, REPLICATED, RULES, CODED, READS),
           {CLOCK: "exchanges them in rounds", CODED: "sends changes of weights",
            EXCHANGE: "sends its changes to a server", FORWARD: "trains by itself",
            LOSS_SCALE: "begins anew in each round", STEPS: "trains by itself"}),
)

_NUMBERS = (
    Method("float16", "compute = 'float16'", {"run.compute": "float16"}, (SKIPPING, LOSS_SCALE),
           {ONE_TYPE: "has two"}, _is("run", "compute", "float16")),
    Method("bfloat16", "compute = 'bfloat16'", {"run.compute": "bfloat16"}, (),
           {ONE_TYPE: "has two"}, _is("run", "compute", "bfloat16")),
    Method("skip", "on_nonfinite = 'skip'", {"run.on_nonfinite": "skip"}, (SKIPPING,)),
    Method("spikes", "on_spike", {"run.on_spike": "skip", "checkpoint.every": 5},
           (SKIPPING, FORWARD)),
    Method("cuda", "a GPU", {"run.device": "cuda"}, (), {HOST: "has them in its own memory"},
           _is("run", "device", "cuda")),
    Method("check-every", "check_every", {"run.check_every": 5}, (REPLICAS,)),
    Method("noise-scale", "noise_scale", {"run.noise_scale": True},
           (EXACT, FORWARD, GRADIENT, REPLICA_SUMS), beside={"train.micro_batches": 2}),
)

_OPTIMIZERS = (
    Method("momentum", "sgd with momentum", {"optim.momentum": 0.9}, (),
           {NO_MOMENTUM: "has one", SOME_ROWS: _ALL_ROWS},
           lambda job: _optimizer("sgd")(job) and job.optim.momentum > 0,
           instead="set optim.momentum = 0"),
    Method("adam", "adam", {"optim.name": "adam"}, (),
           {NO_MOMENTUM: "has one", SOME_ROWS: _ALL_ROWS, VELOCITY: "has another"},
           _optimizer("adam", "adamw")),
    Method("layerwise", "an optimiser with a rate for each tensor", {"optim.name": "lamb"},
           (GRADIENT,), {NO_MOMENTUM: "has one", SOME_ROWS: _ALL_ROWS, VELOCITY: "has another"},
           _optimizer("lars", "lamb")),
    Method("weight-decay", "weight decay", {"optim.weight_decay": 0.01}, (),
           {SOME_ROWS: _ALL_ROWS}),
    Method("clip-norm", "clip_norm", {"optim.clip_norm": 1.0}, (GRADIENT,),
           {SOME_ROWS: "scales each gradient by all others"}),
    Method("clip-value", "clip_value", {"optim.clip_value": 0.01}, (BATCH_GRADIENT,)),
    Method("groups", "a group of parameters",
           {"optim.groups": [{"names": ["*.bias"], "lr": 0.5}]}, (RULES,),
           {ALIKE: "has a rate of its own", SOME_ROWS: "may decay all weights"}),
    Method("average", "an average of parameters", {"optim.average": 0.9}, (),
           {SOME_ROWS: "moves each average in each step"}),
    Method("own-optimizer", "an optimiser of the program", {"own.optimizer": "methods.py:sgd"}, (),
           {RULES: "takes its place", SOME_ROWS: "may move each parameter in each step",
            VELOCITY: "may keep something else"},
           instead="take one by its name, as optim.name = 'adamw'"),
)

_MODELS = (
    Method("mlp", "an mlp", {"model.kind": "mlp"}, (),
           {FEW_ROWS: "changes in all numbers", POSITIONS: "has none", ROWS: "has none"},
           _model("mlp")),
    Method("convolutions", "a convolutional model", {"model.kind": "convnet"}, (),
           {FEW_ROWS: "changes in all numbers", POSITIONS: "has none"},
           _model("convnet", "vgg", "resnet")),
    Method("gpt", "a gpt", _GPT, (), {FEW_ROWS: "changes in all numbers", ROWS: "has none"},
           _model("gpt")),
    Method("tied", "a pipeline of a gpt", _GPT | {"parallel.pipe": 2}, (),
           {REPLICA_SUMS: "sums those of its tied embedding over two stages"},
           lambda job: job.stages > 1 and _model("gpt")(job), instead="set parallel.pipe = 1"),
    Method("experts", "a mixture of experts", {"model.experts": 3} | _GPT),
    Method("recommender", "a recommender", _CLICKS, (),
           {POSITIONS: "has none", REPLICATED: "spreads its tables over the replicas",
            REPLICA_SUMS: "keeps those of its tables on one rank", ROWS: "has none",
            SHAREABLE: "has tables"},
           _model("recommender")),
    Method("own-model", "a model of the program", {"own.model": "methods.py:model"}, (),
           {FEW_ROWS: "may change in all numbers", JOB_MODEL: "has one of its own",
            POSITIONS: "has any layers"},
           instead="take one of mpitrain's by model.kind"),
    Method("own-data", "data of the program", {"own.data": "methods.py:data"}, (),
           {JOB_MODEL: "has others"},
           instead="take data by their name, as data.name = 'arrays'"),
    Method("workers", "a process that reads ahead", {"data.workers": 1}, (),
           {READS: "reads them ahead"}),
)

#: Methods that no key chooses: a caller knows that they are used.
_SITUATIONS = (
    Method("batch-norm", "batch norm", needs=(FORWARD, WIDTHS),
           instead="take group or layer norm"),
    Method("torch", "a torch module", needs=(FORWARD_WEIGHTS,),
           lacks={ROWS: "has code that takes whole ones"}, instead="take layers of mpitrain"),
    Method("recomputed", "a Recomputed layer", needs=(FORWARD_WEIGHTS,), instead="leave it out"),
    Method("link", "a link of COLLECTIVES_LINK or delayed()", needs=(DELAYED,),
           instead="leave COLLECTIVES_LINK and delayed() out"),
    Method("shrink", "--shrink", needs=(DEATHS,), instead="leave --shrink out"),
    Method("drill", "this command", needs=(REPLICAS,), instead="train"),
    Method("steps", "this command", needs=(STEPS,), instead="train"),
    Method("described", "this command", needs=(STEPS, JOB_MODEL), instead="train"),
)
# fmt: on

METHODS = (*_LAYOUT, *_CODECS, *_SYNC, *_SERVERS, *_NUMBERS, *_OPTIMIZERS, *_MODELS, *_SITUATIONS)
