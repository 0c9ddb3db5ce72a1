"""Meetings of all ranks: their steps, and the records of the steps between them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import sqrt

from msgspec import UNSET, UnsetType

from mpitrain.metrics.records import Served, Step
from mpitrain.server.shard import Push


def next_meeting(first: int, end: int, window: int, every: int) -> int:
    """The step after which all ranks meet again, having met after ``first``.

    They meet at ``end``, the last step of the epoch or run, at multiples of ``window``, and after
    each checkpoint, at multiples of ``every`` unless it is 0.
    """
    ends = [end, first + window - first % window]
    if every:
        ends.append(first + every - first % every)
    return min(ends)


@dataclass
class RankReport:
    """Report of a rank at a meeting, on the batches since the last one.

    Attributes:
        losses: part of the mean loss of this worker's group, by batch.
        norms: Euclidean norm of the gradient of this worker's group, by batch.
        leads: whether this worker sends the messages of its group.
        seconds, reading, pulling: since the last meeting, of reading samples, of pulling.
        pushing: seconds of pushing; on a server, of waiting for messages.
        sent: bytes sent to servers or workers, by clock.
        pushes: pushes that a server applied; None on a worker.
        moved: bytes sent in all messages and collectives, and bytes moved in shared memory.
        squares: squared norm of the sum of a clock's gradients, in the part that is updated here.
        memory: most bytes that it has had so far.
    """

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    leads: bool = False
    seconds: float = 0.0
    reading: float = 0.0
    pulling: float = 0.0
    pushing: float = 0.0
    sent: Counter[int] = field(default_factory=Counter)
    pushes: Sequence[Push] | None = None
    moved: tuple[int, int] = (0, 0)
    squares: dict[int, float] = field(default_factory=dict)
    memory: float = 0.0


def steps(
    told: Sequence[RankReport],
    batches: Sequence[int],
    first: int,
    epoch: int,
    rate: Callable[[int], float],
    shares: Callable[[int], Sequence[int]],
) -> list[Step]:
    """A record for each step of an epoch, from number ``first`` on, counted from 0.

    The gradient's norm is that of the whole batch's gradient with ``bound = 0``, and where all
    gradients but the tables' are summed (each row then counts for one worker); else the mean of the
    norms of the workers' gradients, each a mean over the worker's own samples.

    Args:
        told: report of each rank.
        batches: samples in each batch.
        rate: the learning rate of a step.
        shares: samples of each group in a batch with this number of samples.
    """
    workers = [one for one in told if one.pushes is None]
    servers = [one for one in told if one.pushes is not None]
    leaders = [one for one in workers if one.leads]
    seconds = sum(one.seconds for one in told) / len(told) / len(batches)
    spent = sum(one.seconds for one in workers)
    pushing, pulling, reading = (
        min(1.0, sum(parts) / spent)
        for parts in zip(*((one.pushing, one.pulling, one.reading) for one in workers))
    )
    sent, shared = (sum(part) / len(told) / len(batches) for part in zip(*(t.moved for t in told)))
    found = []
    for clock, samples in enumerate(batches, first):
        norms = [one.norms[clock] for one in leaders if clock in one.norms]
        losses = [one.losses[clock] for one in leaders if clock in one.losses]
        if squares := [one.squares[clock] for one in told if clock in one.squares]:
            norm = sqrt(sum(squares))
        else:
            own = shares(samples)
            parts = [norm * samples / n for norm, n in zip(norms, own, strict=True) if n]
            norm = sum(parts) / len(parts)
        found.append(
            Step(
                step=clock + 1,
                epoch=epoch,
                samples=samples,
                # A worker that a quorum has left behind skips batches.
                loss=sum(losses) * (len(leaders) / len(losses)),
                grad_norm=norm,
                lr=rate(clock),
                seconds=seconds,
                samples_per_s=samples / seconds,
                comm_share=pushing,
                wait_share=pulling,
                read_share=reading,
                sent_bytes=sent,
                shared_bytes=shared,
                memory=sum(one.memory for one in told) / len(told),
                served=_served(clock, workers, servers),
            )
        )
    return found


def _served(
    clock: int, workers: Sequence[RankReport], servers: Sequence[RankReport]
) -> Served | UnsetType:
    if not servers:
        return UNSET
    own = [[p for p in one.pushes or () if p.clock + p.clocks - 1 == clock] for one in servers]
    every = [push for pushes in own for push in pushes]
    return Served(
        pushes=len(own[0]),
        lag=sum(push.lag for push in every) / max(1, len(every)),
        lag_max=max((push.lag for push in every), default=0),
        behind_max=max((push.behind for push in every), default=0),
        pushed_bytes=sum(one.sent[clock] for one in workers),
        pulled_bytes=sum(one.sent[clock] for one in servers),
    )
