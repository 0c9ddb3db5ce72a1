"""Records of a run's report; ``event`` names the kind of a line in the file."""

from collections.abc import Callable
from math import sqrt
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from mpitrain.metrics.words import counted, digits, in_words, measured, summed


class Start(Struct, frozen=True, tag="start", tag_field="event"):
    """The beginning of a run.

    Attributes:
        ranks: number of processes.
        processes: ``host:number`` of each rank, by which launchers name a dead one.
        layout: arrangement of the ranks.
        stages: the layers of each stage of the pipeline, chunk after chunk.
        algorithm: all-reduce of the gradients of rank 0's stage.
        reason: why it was chosen.
        parameters: number of trained numbers.
        config: the job by table and key, defaults included; ``own`` names what a program brings.
        date: in UTC, to the second, as ISO 8601 has it.
        devices: device of each rank.
        tokens: tokens of a sample; 0: samples are no lines of tokens, or vary.
        peak: operations a second of all ranks together in products of matrices; 0: not measured.
        software: versions of ``mpitrain``, ``mpi`` (the library), ``mpi4py``, ``numpy`` and
            ``python``.
    """

    ranks: int
    processes: list[str]
    layout: str
    stages: list[list[str]]
    algorithm: str
    reason: str
    parameters: int
    config: dict[str, dict[str, Any]]
    date: str = ""
    software: dict[str, str] = {}
    devices: list[str] = []
    tokens: int = 0
    peak: float = 0.0


class Served(Struct, frozen=True):
    """Work of the servers on the gradients of a step.

    Attributes:
        pushes: pushes to each server that count in the step.
        lag, lag_max: pushes that were missing in the parameters of a gradient, mean and largest
            over all servers.
        behind_max: clocks by which the slowest worker was behind, at most ``server.bound``.
        pushed_bytes: bytes that workers sent, headers included.
        pulled_bytes: bytes that servers sent.
    """

    pushes: int
    lag: float
    lag_max: int
    behind_max: int
    pushed_bytes: int
    pulled_bytes: int


class Synced(Struct, frozen=True):
    """Exchanges of workers that do not sum their gradients in every step.

    Attributes:
        exchanges: exchanges since the beginning.
        since: steps since the last one.
        drift: distance of the workers' weights from their common ones, relative to the norm of
            these, just before the last reported exchange.
    """

    exchanges: int
    since: int
    drift: float = 0.0

    def __str__(self) -> str:
        return f"exchange {self.exchanges}, drift {self.drift:.2g}"


class Noise(Struct, frozen=True):
    """Signal and noise of a step's gradient.

    Attributes:
        gradient_square, variance: estimates of the squared norm of the true gradient and of the
            trace of the covariance of a sample's; single ones may be negative.
        noise_scale: the second over the first, each a moving average over some 100 steps: the
            critical batch in samples.  0: the averages show no gradient.
    """

    gradient_square: float
    variance: float
    noise_scale: float

    def __str__(self) -> str:
        return f"noise scale {digits(self.noise_scale)}"


class Step(Struct, frozen=True, tag="step", tag_field="event"):
    """One step of all ranks.

    Attributes:
        step: counted from 1 through the whole run.
        epoch: counted from 0.
        samples: in the global batch.
        loss: mean over the global batch, before the update.
        grad_norm: Euclidean norm of the global gradient.
        lr: learning rate.
        seconds: wall-clock time since the step before, checkpoints left out, mean over the ranks.
        samples_per_s: throughput of all ranks together.
        comm_share: part of ``seconds`` spent in reducing gradients, waits for slower ranks
            included, 0 to 1.
        wait_share: part of ``seconds`` spent in waiting for other stages of the pipeline, and for
            the last rank at the end of the step.
        read_share: part of ``seconds`` spent in reading samples, or in waiting for the processes
            that read them ahead.
        sent_bytes: bytes that a rank sent in messages of collectives, mean over the ranks; in those
            that are left to the MPI library, the least that a rank must send.
        shared_bytes: bytes that it moved in the node's shared memory instead.  Exchanges of
            workers and ZeRO's parameters follow the agreement on a step; they count in the seconds
            and bytes of the next step, or of the last one.
        memory: most bytes that a rank has had so far, on a GPU there; mean over the ranks.
        served: present in jobs with servers: ``seconds`` and ``sent_bytes`` are means over the
            steps between two meetings, ``comm_share`` is the workers' time in pushes and
            ``wait_share`` in pulls.
        sync: present if workers do not sum their gradients in each step.
        noise: present with ``run.noise_scale``.
    """

    step: int
    epoch: int
    samples: int
    loss: float
    grad_norm: float
    lr: float
    seconds: float
    samples_per_s: float
    comm_share: float
    wait_share: float = 0.0
    read_share: float = 0.0
    sent_bytes: float = 0.0
    shared_bytes: float = 0.0
    memory: float = 0.0
    served: Served | UnsetType = UNSET
    sync: Synced | UnsetType = UNSET
    noise: Noise | UnsetType = UNSET


class Round(Struct, frozen=True, tag="round", tag_field="event"):
    """A round of federated training, before the step that is its mean change.

    Attributes:
        step: the round, counted from 1.
        asked: clients that were asked, counted as often as they were drawn, here and below.
        taken: clients whose changes count.
        dropped: clients that never answered, or too late.
        partial: taken clients that the deadline has cut off.
        steps: local steps of all that count.
        clock: seconds of the round on the clients' own clock.
        client_bytes: most bytes of a client, keys and shares included.
        plain_bytes: bytes of an uncompressed change.
        rank_bytes: most bytes of a rank to other ranks, or in shared memory, for the mean.
        clipped: share of the sent numbers that were cut to the grid.
        losses: mean loss of the steps of each client whose change counts, by its name.
        prox: mu of FedProx.
    """

    step: int
    asked: int
    taken: int
    dropped: int
    partial: int
    steps: int
    clock: float
    client_bytes: int
    plain_bytes: int
    rank_bytes: int
    clipped: float = 0.0
    losses: dict[str, float] = {}
    prox: float = 0.0

    def __str__(self) -> str:
        cut = f", {self.partial} of them cut off" if self.partial else ""
        by_loss, told = sorted(self.losses, key=self.losses.__getitem__), ""
        if by_loss:
            ends = (f"{self.losses[one]:.3g} (client {one})" for one in (by_loss[0], by_loss[-1]))
            told = f"; losses from {' to '.join(ends)}"
        return (
            f"round {self.step}: {self.taken} of {self.asked} clients{cut}; each sent "
            f"at most {self.client_bytes} bytes of a change of {self.plain_bytes}{told}"
        )


class Skipped(Struct, frozen=True, tag="skipped", tag_field="event"):
    """A step without effect, as its loss or gradient was not finite.

    Attributes:
        step: counted from 1.
        culprits: ranks and parameters.
        loss_scale: loss scale from now on.
        sync: as in :class:`Step`.
    """

    step: int
    culprits: str
    loss_scale: float
    sync: Synced | UnsetType = UNSET


class Straggler(Struct, frozen=True, tag="straggler", tag_field="event"):
    """A rank that kept its peers waiting since the last look, ``run.log_every`` steps ago.

    Attributes:
        step: last step.
        rank, host: the rank and its host.
        factor: its time outside of communication over the median of its peers', which have the
            same stage of the pipeline.
    """

    step: int
    rank: int
    host: str
    factor: float


class Saved(Struct, frozen=True, tag="saved", tag_field="event"):
    """A checkpoint was written.

    Attributes:
        step: step after which it continues.
        path: folder.
        seconds: from the decision to the last byte on disk.
    """

    step: int
    path: str
    seconds: float


class Resumed(Struct, frozen=True, tag="resumed", tag_field="event"):
    """Training goes on from a checkpoint.

    Attributes:
        step: last step of the checkpoint.
        path: its folder.
        refused: newer checkpoints that could not be used, and why.
        notes: differences from the run before.
    """

    step: int
    path: str
    refused: list[str]
    notes: list[str] = []


class Back(Struct, frozen=True, tag="back", tag_field="event"):
    """All ranks went back to a checkpoint after a spike of the loss; its steps come again.

    Attributes:
        step: last step of the checkpoint.
        spike: last step of the spike.
        why: the loss that ended it.
        left_out: later steps whose batches change nothing, and which have no record.
        times: times that the run went back so far.
        refused: as in :class:`Resumed`.
    """

    step: int
    spike: int
    why: str
    left_out: list[int]
    times: int
    refused: list[str] = []

    def __str__(self) -> str:
        steps = ", ".join(map(str, self.left_out))
        without = f" without {counted(len(self.left_out), 'step')} ({steps})" if steps else ""
        refused = "".join(f"; checkpoint refused: {why}" for why in self.refused)
        return f"back to step {self.step}{without}, time {self.times}: {self.why}{refused}"


class Epoch(Struct, frozen=True, tag="epoch", tag_field="event"):
    """A test after a pass over the training samples.

    Attributes:
        epoch: counted from 0.
        test_loss: mean over their labels.
        metrics: by name, on the test samples, too.
    """

    epoch: int
    test_loss: float
    metrics: dict[str, float] = {}

    def __str__(self) -> str:
        told = f"{measured(self.metrics)}, " if self.metrics else ""
        return f"epoch {self.epoch}: test {told}loss {self.test_loss:.4f}"


class RankTime(Struct, frozen=True):
    """Time of one rank in all steps since the start.

    Attributes:
        stage, tensor: place in the layout; ranks with equal places reduce the same gradients.
        computing: seconds outside of communication.
        reducing: seconds in the sum of gradients.
        waiting: seconds of waiting for another stage, by the rank of that stage.
        meeting: seconds at the ends of steps, where all ranks agree on loss and norm and wait for
            the last one.
        memory: peak memory of the process in bytes.
    """

    stage: int
    tensor: int
    computing: float
    reducing: float
    waiting: dict[int, float]
    meeting: float
    memory: int


class Times(Struct, frozen=True, tag="times", tag_field="event"):
    """Times of the ranks, at the end of a run or when it is stopped."""

    ranks: list[RankTime]


class Summary(Struct, frozen=True, tag="summary", tag_field="event"):
    """The end of a run; rates and shares, which are as in :class:`Step`, are over all its steps.

    Attributes:
        test_loss: loss of the last test; nan without one.
        ended: why training ended.
        tested: whether there were samples to test on.
        sent_bytes, shared_bytes: mean of a step.
        dense_bytes: bytes of an uncompressed sum, 2 (p-1)/p times the gradients' on p replicas,
            mean over the ranks.
        step_s, save_s: seconds of a step, and of writing a checkpoint, mean over those of the run.
        mtbf: ``checkpoint.mtbf``.
        busiest_bytes: bytes of a step, sent and moved in shared memory, of the rank with most.
    """

    test_loss: float
    ranks: int
    algorithm: str
    reason: str
    samples_per_s: float
    comm_share: float
    wait_share: float = 0.0
    metrics: dict[str, float] = {}
    read_share: float = 0.0
    ended: str = ""
    sent_bytes: float = 0.0
    shared_bytes: float = 0.0
    dense_bytes: float = 0.0
    tested: bool = True
    step_s: float = 0.0
    save_s: float = 0.0
    mtbf: float = 0.0
    busiest_bytes: float = 0.0

    def __str__(self) -> str:
        told = measured(self.metrics) or f"loss {self.test_loss:.6f}"
        tested = f"test {told}" if self.tested else "no test"
        reading = f"reading {self.read_share:.1%}, " if self.read_share >= 0.01 else ""
        return (
            f"{tested}, {counted(self.ranks, 'rank')}, "
            f"gradients {summed(self.algorithm, self.reason)}, {self.samples_per_s:.0f} samples/s, "
            f"{reading}reduction {self.comm_share:.1%} and waiting {self.wait_share:.1%} of "
            f"step time{self._exchanged()}{self.ended and f'; {self.ended}'}{self._saved()}"
        )

    @property
    def interval(self) -> float:
        """Seconds from one checkpoint to the next that lose least (Young 1974)."""
        return sqrt(2 * self.save_s * 3600 * self.mtbf)

    def _saved(self) -> str:
        """The interval between checkpoints, if the time between failures is known."""
        if not (self.interval and self.step_s):
            return ""
        every = max(1, round(self.interval / self.step_s))
        return (
            f"; a checkpoint takes {self.save_s:.2g} s: with a failure in {self.mtbf:g} h, "
            f"checkpoint.every = {every}, or {digits(self.interval)} s, loses least"
        )

    def _exchanged(self) -> str:
        """Bytes of a step beside those of an uncompressed sum."""
        moved = self.sent_bytes + self.shared_bytes
        if not moved or not self.dense_bytes:
            return ""
        mean, most, dense = map(in_words, (moved, self.busiest_bytes, self.dense_bytes))
        busiest = f", the busiest {most}" if self.busiest_bytes and most != mean else ""
        return f"; a rank sends {mean} a step on average{busiest} (a dense sum: {dense})"


Record = (
    Start | Step | Round | Skipped | Straggler | Epoch | Saved | Resumed | Back | Times | Summary
)
Write = Callable[[Record], None]
