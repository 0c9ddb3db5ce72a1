"""Settings that a job file may have, and how it is told of others."""

import re
from itertools import product
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import fields

from mpitrain.config import Config, ConfigError, Optim, configured, load

EXAMPLES = sorted((Path(__file__).parents[3] / "jobs" / "examples").glob("*.toml"))


@pytest.fixture
def job(tmp_path):
    def write(text):
        path = tmp_path / "job.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid_and_read_again_as_they_were(path):
    config = load(path)
    assert config.run.dir == f"runs/{path.stem}"
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config


def test_values_are_read(job):
    algorithm = "parameter_server:servers=2"
    config = load(
        job('[run]\ndir = "out"\n[model]\nhidden = [3, 4]\n[optim]\nlr = 1\n'),
        ["train.epochs=3\r", "model.hidden=[9]", f"parallel.algorithm={algorithm}",
         'run.dtype="float64"'],
    )  # fmt: skip
    assert config.run.dir == "out"
    assert config.run.dtype == "float64"
    assert config.model.hidden == (9,)
    assert config.optim == Optim(lr=1.0)
    assert config.train.epochs == 3
    assert config.parallel.algorithm == algorithm


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optin]\n", "optin: unknown key; did you mean 'optim'?"),
        ("[optim]\nlearning = 1\n", "optim.learning: unknown key; expected one of name, lr, "),
        ("[train]\nbatchsize = 1\n", "train.batchsize: unknown key; did you mean 'batch_size'?"),
        ("[data]\nname = 'digit'\n", "data.name = 'digit': unknown value; did you mean 'digits'?"),
        ("[optim]\nname = 'zzz'\n", "optim.name = 'zzz': unknown value; expected one of adam"),
        ("[optim]\nlr = 'fast'\n", "optim.lr: expected a number, got 'fast'"),
        ("[optim]\nlr = -1.0\n", "optim.lr: expected a number > 0.0, got -1.0"),
        ("[model]\nhidden = [4, 0]\n", "model.hidden[1]: expected a whole number >= 1, got 0"),
        ("[data]\nname = 3\n", "data.name: expected a text, got 3"),
        ("train = 3\n", "train: expected a table, got 3"),
        ("[optim.groups]\nlr = 1\n", "{'lr': 1}; each table of a list has a header of its own, ["),
        ("[loss]\nignore_index = true\n", "expected a whole number or a text, got True"),
        ("[optim]\nwarmup_epochs = 10\n", "optim.warmup_epochs: 10 must be less than train"),
        ("[parallel]\npartition = 'evn'\n", "= 'evn': unknown value; did you mean 'even'"),
        ("[server]\nbound = 'non'\n", "server.bound = 'non': unknown value; did you mean 'none'?"),
        ("[train]\nmicro_batches = 1025\n", "a batch of 64 samples has no 1025 parts; take"),
        ("[parallel]\nalgorithm = 'rign'\n", "parallel.algorithm: no allreduce algorithm 'rign'"),
        ("[optim]\nwarmup_steps = -1\n", "optim.warmup_steps: expected a whole number >= 0"),
        ("[run]\nrecords = ['csb']\n", "run.records[0] = 'csb': unknown value; did you mean"),
        ("[optim\n", "cannot read the job file"),
        ("[optim]\nclip_norm = inf\n", "optim.clip_norm: must be a finite number, not inf"),
        ("[run]\ndir = ''\n", "run.dir: is empty; name a folder, or leave it out"),
        ('[run]\ndir = "a\\u0000b"\n', "run.dir: must not hold the character NUL"),
        (f"[run]\nseed = {2**63}\n", "run.seed: expected a whole number <= 9223372036854775807"),
        ("[model]\nhidden = [9999999999999]\n", "hidden[0]: expected a whole number <= 21474"),
        (f"x = {'[' * 3000}", "it is nested too deeply"),
        (f"x = {'9' * 5000}", "Exceeds the limit"),
        ("#" * 2_000_000, "it has more than 1048576 bytes"),
    ],
)
def test_mistakes_are_one_sentence_with_the_place(job, text, message):
    with pytest.raises(ConfigError) as caught:
        load(job(text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr", "--set takes table.key=value"),
        ("lr=1", "--set takes table.key=value"),
        ("optim.=1", "--set takes table.key=value"),
        ("optim.lr=0,1", "optim.lr: expected a number, got '0,1'"),
        ("optim.lt=1", "optim.lt: unknown key; did you mean 'lr'?"),
        ("run.dir=", "run.dir: is empty"),
        ("run.dir=~/a", "run.dir: '~/a' would make a folder called ~; only a shell expands it"),
        ("run.dir=\udcff", "run.dir: is not UTF-8: '\\udcff'"),
        (f"x.y={'[' * 3000}", "x.y: the value is nested too deeply"),
        (f"optim.lr={'9' * 5000}", "optim.lr: expected a number, got '9999999"),
        ("optim.lr.x=1", "optim.lr.x: lr is a value in the job file, not a table"),
    ],
)
def test_mistakes_in_overrides(job, override, message):
    with pytest.raises(ConfigError) as caught:
        load(job("[optim]\nlr = 0.5\n"), [override])
    assert message in str(caught.value)


def test_every_number_of_a_job_is_finite(job):
    every = [(table.name, field) for table in fields(Config()) for field in fields(table.type())]
    places = [f"{table}.{one.name}" for table, one in every if isinstance(one.default, float)]
    assert len(places) > 10
    for place, value in product(places, ("inf", "nan")):
        with pytest.raises(ConfigError, match=place):
            load(job(""), [f"{place}={value}"])


@pytest.mark.parametrize(
    ("path", "why"), [("/dev/zero", "it has more"), (__file__, "it is a program")]
)
def test_other_files_are_no_job_files(path, why):
    with pytest.raises(ConfigError, match=f"cannot read the job file {path}: {why}"):
        load(Path(path))


def test_an_own_algorithm_is_registered_by_the_program(tmp_path):
    from collectives import Algorithm, register
    from collectives.algorithms import ring

    job = tmp_path / "job.toml"
    job.write_text("")
    with pytest.raises(ConfigError, match=r"parallel.algorithm: .*is a file.*collectives.register"):
        load(job, ["parallel.algorithm=mine.py:of_a_job"])
    with pytest.raises(ConfigError, match="no allreduce algorithm 'of_a_job'"):
        load(job, ["parallel.algorithm=of_a_job"])
    register(Algorithm("allreduce", "of_a_job", ring.allreduce, chunks=lambda size: size))
    config = load(job, ["parallel.algorithm=of_a_job:segments=2"])
    assert config.parallel.algorithm == "of_a_job:segments=2"


def test_with_zero_1_the_algorithm_is_one_of_a_reduce_scatter(job):
    for fits in ("ring", "auto", "native", "ring:segments=2"):
        load(job(""), ["parallel.zero=1", f"parallel.algorithm={fits}"])
    for of_allreduce_alone in ("double_binary_tree", "parameter_server:servers=2"):
        load(job(""), [f"parallel.algorithm={of_allreduce_alone}"])
        name = of_allreduce_alone.partition(":")[0]
        told = f"^parallel.algorithm: no reduce_scatter algorithm {name!r}; .* or set zero = 0$"
        with pytest.raises(ConfigError, match=told):
            load(job(""), ["parallel.zero=1", f"parallel.algorithm={of_allreduce_alone}"])


def test_the_job_of_a_checkpoint_is_read_without_its_algorithm():
    job = msgspec.convert({"parallel": {"algorithm": "of_a_program_that_is_gone"}}, Config)
    assert job.parallel.algorithm == "of_a_program_that_is_gone"


GPT = ["model.kind=gpt", "data.name=text", "data.path=x", "model.width=8"]
#: The ends of a GPT share an embedding, whose gradients are summed over both.
ENDS = [*GPT, "parallel.pipe=2", "optim.momentum=0"]
TENSOR = [*GPT, "parallel.tensor=4", "parallel.sequence=true"]
EXPERTS = [*GPT, "model.experts=2", "parallel.experts=2"]
DGC = ["compress.codec=dgc", "optim.momentum=0"]
CLIENTS = ["federated.clients=10", "model.kind=mlp"]
ROUNDS = [*CLIENTS, "federated.rounds=50", "train.epochs=1", "optim.schedule=wsd"]
SECURE = ["federated.secure=true", "model.kind=mlp"]
OUTER = ["sync.kind=local"]
#: Keys beside a server.
SERVED = {
    "server.fetch=2": "server.fetch: a bound counts clocks",
    "server.push=2": "server.push: a bound counts clocks",
    "server.bound=0 server.correct=predict": "server.correct: server.bound = 0 has no",
    "server.correct=predict optim.momentum=0": "server.correct: predict looks ahead",
    "server.quorum=0.5": "server.quorum: one server leaves out late pushes; set ranks = 1",
    "server.correct=rate": "server.correct = 'rate' has gone; set a smaller server.bound",
    "server.bound=-2": "server.bound: expected a whole number >= -1",
    "server.bound=many": "server.bound = 'many': unknown value; expected one of",
    "compress.codec=bf16 compress.start=3": "compress.start: a push to a server is",
    "compress.codec=bf16 compress.least=3": "compress.least: a push to a server is",
    "parallel.replicas=[2]": "parallel.replicas: the ranks that are no servers are the",
    "parallel.data=2": "parallel.data: the ranks that are no servers are the workers",
}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.replicas=[2,1]", "parallel.pipe=3"], "parallel.replicas: gives the stages"),
        (["parallel.pipe=2", "parallel.partition=[1,1,1]"], "parallel.partition: 3 numbers for 2"),
        (["parallel.partition=auto"], "parallel.partition: auto needs parallel.profile"),
        (["parallel.chunks=2"], "parallel.chunks: 1f1b has one chunk a stage"),
        (["model.kind=gpt"], "model.kind: a gpt cannot be trained on digits"),
        (["model.kind=mlp", "data.name=clicks"], "model.kind: a mlp cannot be trained on clicks"),
        (["parallel.zero=4"], "parallel.zero: expected a whole number <= 3"),
        ([*GPT, "model.heads=3"], "do not divide a width of 8; take another number of heads, or a"),
        ([*GPT, "model.heads=2", "parallel.tensor=4"], "parallel.tensor: 4 ranks cannot share 2 h"),
        ([*TENSOR, "data.context=6"], "cannot share 6 pos"),
        (["optim.name=adam", "optim.momentum=0.5"], "optim.momentum: optim.name = 'adam' does not"),
        (["optim.name=lars", "optim.nesterov=true"], "'lars' does not read it, 'sgd' does; leave"),
        (["optim.beta2=0.9"], "'adam' and 'adamw' and 'lamb' do; leave it out, or set beta2 = 0.9"),
        (["optim.milestones=[3]"], "optim.milestones: optim.schedule = 'constant' does not read"),
        (["optim.schedule=step"], "optim.milestones: optim.schedule = 'step' multiplies"),
        (["own.optimizer=m:f", "optim.momentum=0.5"], "the program brings (m:f) does not read it"),
        (["run.loss_scale=1"], "run.loss_scale: run.compute = 'same' does not read it"),
        (["parallel.weights=latest"], "parallel.weights: parallel.schedule = '1f1b' does not"),
        (["sync.period=5"], "sync.period: sync.kind = 'every_step' does not read it, 'local' and"),
        (["sync.kind=delayed", "sync.outer=plain:"], "sync.outer: sync.kind = 'delayed' does"),
        (["sync.fragments=2"], "sync.fragments has gone; workers exchange the whole model at"),
        (["sync.kind=quorum"], "sync.kind = 'quorum' has gone; servers have it: set server.ranks"),
        (["compress.exchange=gathered"], "compress.exchange has gone; codes go in two phases"),
        (["model.heads=2"], "model.heads: model.kind = 'convnet' does not read it, 'gpt' does"),
        (["own.model=m:f", "model.hidden=[8]"], "the model that the program brings (m:f) does not"),
        (["compress.start=3"], "compress.start: compress.codec = 'none' does not read it; set co"),
        (["own.classes=9"], "own.classes: own.data = '' does not read it; set own.data"),
        (["compress.codec=int8", "compress.sparse=pruned_ring"], "compress.sparse: compress.codec"),
        (["federated.server_momentum=0.5"], "clients = 0 does not read it; set federated.clients"),
        (["federated.clients=2", "federated.alpha=0.1"], "split = 'iid' does not read it, 'dirich"),
        (["evaluate.watch=accuracy"], "evaluate.watch: says by which value training ends early"),
        ([*GPT, "model.experts=1"], "model.top: a position cannot go through 2 of 1 experts"),
        ([*GPT, "parallel.experts=2"], "parallel.experts: the model has none to share"),
        ([*EXPERTS, "parallel.alltoall=bruck"], "alltoall: bruck needs blocks of equal length"),
        ([*EXPERTS, "parallel.alltoall=pairwize"], "alltoall: no alltoall algorithm 'pairwize'"),
        (["compress.codec=auto"], "there is no codec 'auto'"),
        (["compress.codec=terngrad", "compress.feedback=on"], "what terngrad leaves out would gr"),
        ([*DGC, "compress.feedback=off"], "what dgc keeps is its momentum"),
        ([*DGC, "compress.start=3"], "dgc warms up by itself"),
        (["compress.codec=topk:keep=much"], "'topk:keep=much': keep: Expected `float`, got `str`"),
        (["parallel.zero=3", "compress.codec=bf16", "compress.feedback=on"], "needs a codec that"),
        ([*ENDS, "compress.codec=signum"], "sums those of its tied embedding over two stages"),
        ([*ENDS, "sync.combine=adasum"], "sums those of its tied embedding over two stages"),
        (["optim.warmup_steps=5", "optim.warmup_epochs=1"], "warmup_epochs = 1 says the same"),
        ([*OUTER, "sync.outer=adam"], "there is no 'adam'; there are plain, momentum, nesterov"),
        ([*OUTER, "sync.outer=plain:lr=1"], "'lr=1' is no option of plain, which has no options"),
        ([*OUTER, "sync.outer=nesterov:rate=1"], "of nesterov, which has lr, momentum"),
        ([*OUTER, "sync.outer=nesterov:lr"], "lr has no value; write it behind lr="),
        ([*OUTER, "sync.outer=nesterov:lr=0"], "'nesterov:lr=0': lr: Expected `float` > 0"),
        ([*OUTER, "sync.outer=nesterov:momentum=1"], "momentum: Expected `float` < 1"),
        ([*OUTER, "sync.outer=nesterov:lr=much"], "lr: Expected `float`, got `str`"),
        (["sync.kind=delayed", "sync.period=2", "sync.delay=3", "compress.codec=bf16"],
         "set sync.delay to at most sync.period, or take another compress.codec"),
        ([*CLIENTS, "federated.sample=11"], "federated.sample: there are 10 clients, and 11 are"),
        ([*CLIENTS, "federated.take=11"], "federated.take: 10 clients are asked, and 11 are to be"),
        ([*CLIENTS, "federated.clip=1.0"], "federated.clip: cuts numbers on a grid; set bits"),
        ([*CLIENTS, "federated.kept=0.0"], "federated.kept: expected a number > 0.0"),
        ([*CLIENTS, "federated.bits=25"], "federated.bits: expected a whole number <= 24"),
        ([*CLIENTS, "federated.server=sdg"], "federated.server = 'sdg': unknown value; did you"),
        ([*CLIENTS, "train.steps=5"], "train.steps: a client takes the steps of its epochs"),
        ([*ROUNDS, "optim.warmup_epochs=50"], "warmup_epochs: 50 must be less than federated"),
        ([*ROUNDS, "optim.warmup_epochs=5", "optim.decay_epochs=46"], "at most 45 epochs"),
        ([*SECURE, "federated.clients=2"], "federated.secure: each of 2 clients knows from the"),
        ([*SECURE, "federated.clients=9", "federated.take=5"], "threshold: 6 of the 9 clients"),
        ([*SECURE, "federated.clients=9", "federated.sample=6", "federated.take=2"],
         "federated.secure: each of 2 clients knows"),
        *((["server.ranks=1", *keys.split()], message) for keys, message in SERVED.items()),
    ],
)  # fmt: skip
def test_what_does_not_go_together_and_keys_that_nothing_reads(job, overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(job(""), overrides)


@pytest.mark.parametrize(("example", "switch"), [("federated", "clients"), ("server", "ranks")])
def test_a_job_without_its_clients_or_servers_is_one_of_the_other_tables(example, switch):
    job = load(Path(example), [f"{example}.{switch}=0"])
    assert getattr(job, example) == getattr(Config(), example)
    assert configured(load(Path(example)), {example: {switch: 0}}) == job
    if switch == "ranks":  # a key of one table alone
        assert configured(load(Path(example)), {switch: 0}) == job


def test_schedules_count_the_rounds_of_clients(job):
    assert load(job(""), [*ROUNDS, "optim.warmup_epochs=5", "optim.decay_epochs=45"]).passes == 50


def test_keys_that_nothing_reads_may_be_at_their_defaults(job):
    load(job(""), ["optim.name=adam", "optim.momentum=0.9", "parallel.window=64"])
    # As in a checkpoint of an earlier version.
    written = msgspec.json.encode(Config(optim=Optim("adam", momentum=0.5)))
    assert msgspec.json.decode(written, type=Config).optim.momentum == 0.5
