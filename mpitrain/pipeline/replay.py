"""Proof of a schedule before it runs: all ranks at once, with no data.

    report = replay(SCHEDULES["1f1b"].generate, Pipeline((1, 1, 1, 1), micro_batches=8))

finds actions that wait for ever, come twice or not at all, and messages that would arrive in
another order than they are awaited; it reports held activations and the age of weights.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpitrain.pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Pipeline,
    Update,
)
from mpitrain.pipeline.schedules import Generator

#: A replica of a stage, as (stage, replica).
StageReplica = tuple[int, int]


class PipelineError(ValueError):
    """A schedule that cannot run, or would not train what it should."""


@dataclass(frozen=True)
class Report:
    """Results of replaying a schedule.

    Attributes:
        pipeline: the pipeline.
        order: the actions of all ranks as (place, action), each after its sources.
        actions: actions of each (stage, replica).
        held: most micro-batches whose activations, or their parts for weight gradients, a (stage,
            replica) holds at a time; each chunk counts.
        staleness: updates between the forward pass of a (stage, micro-batch) and its own update: 0
            in synchronous training.
        versions: updates before the forward pass of a (stage, micro-batch).
        sums: the last actions of all replicas before an update of a (stage, number), which sums
            their gradients.
    """

    pipeline: Pipeline
    order: Sequence[tuple[StageReplica, Action]]
    actions: dict[StageReplica, tuple[Action, ...]]
    held: dict[StageReplica, int]
    staleness: dict[tuple[int, int], int]
    versions: dict[tuple[int, int], int]
    sums: "Sums"

    def needs(self, place: StageReplica, action: Action) -> list[tuple[StageReplica, Action]]:
        """Actions of which those in the schedule must come before an action."""
        if isinstance(action, Update):
            return self.sums[place[0], action.number]
        return _senders(self.pipeline, place, action)

    @cached_property
    def sources(self) -> list[list[int]]:
        """For each action of ``order``, the indices there of those that it needs."""
        at = {one: number for number, one in enumerate(self.order)}
        return [[at[own] for own in self.needs(*one) if own in at] for one in self.order]


#: The last actions of all replicas before an update of a (stage, number).
Sums = dict[tuple[int, int], list[tuple[StageReplica, Action]]]


def replay(generate: Generator, pipeline: Pipeline) -> Report:
    """Run all ranks' actions against one another.

    Raises:
        PipelineError: naming the stage, the replica, the action and what is wrong with it.
    """
    actions = {place: tuple(generate(pipeline, *place)) for place in pipeline.places()}
    for place, own in actions.items():
        _check_complete(pipeline, place, own)
    sums = _sums(actions)
    order = _order(pipeline, actions, sums)
    _check_fifo(pipeline, actions)
    versions, staleness = _ages(pipeline, actions)
    return Report(
        pipeline=pipeline,
        order=order,
        actions=actions,
        held={place: _most_held(own) for place, own in actions.items()},
        staleness=staleness,
        versions=versions,
        sums=sums,
    )


def _senders(
    pipeline: Pipeline, place: StageReplica, action: Compute
) -> list[tuple[StageReplica, Action]]:
    """Actions that may send the input of an action; one of them must come before it.

    A gradient comes from a Backward or a BackwardInput, whichever the schedule uses.
    """
    found, _ = pipeline.beside(place[0], action)
    if found is None:
        return []
    kinds = (Forward,) if isinstance(action, Forward) else (Backward, BackwardInput)
    return [(found.place, kind(action.micro_batch, found.chunk)) for kind in kinds]


def _check_complete(pipeline: Pipeline, place: StageReplica, own: tuple[Action, ...]) -> None:
    who = f"stage {place[0]} replica {place[1]}"
    wanted = {(m, chunk) for m in pipeline.own(*place) for chunk in range(pipeline.chunks)}
    done: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for action in own:
        if isinstance(action, Update):
            continue
        item = (action.micro_batch, action.chunk)
        kinds = {
            Forward: ("forward",),
            Backward: ("input", "weight"),
            BackwardInput: ("input",),
            BackwardWeight: ("weight",),
        }[type(action)]
        before = {"forward": None, "input": "forward", "weight": "input"}
        for kind in kinds:
            earlier = before[kind]
            if earlier and not done[earlier][item]:
                raise PipelineError(f"{who}: {action} comes before the {earlier} pass it needs")
            done[kind][item] += 1
    for kind in ("forward", "input", "weight"):
        if done[kind] != Counter(dict.fromkeys(wanted, 1)):
            wrong = sorted(set(done[kind]) ^ wanted) or [
                item for item, count in done[kind].items() if count > 1
            ]
            raise PipelineError(
                f"{who}: the {kind} pass of micro-batch {wrong[0][0]} in chunk {wrong[0][1]} "
                f"must come once, not {done[kind][wrong[0]]} times"
            )
    numbers = [action.number for action in own if isinstance(action, Update)]
    if numbers != list(range(len(numbers))) or not isinstance(own[-1] if own else None, Update):
        raise PipelineError(f"{who}: updates must be counted from 0 and come last, not {numbers}")


def _sums(actions: dict[StageReplica, tuple[Action, ...]]) -> Sums:
    """Raises PipelineError: replicas of a stage update unequally often."""
    sums: Sums = defaultdict(list)
    updates: dict[int, int] = {}
    for place, own in actions.items():
        before = None
        count = 0
        for action in own:
            if isinstance(action, Update):
                count += 1
                if before is not None:
                    sums[place[0], action.number].append((place, before))
            else:
                before = action
        if updates.setdefault(place[0], count) != count:
            raise PipelineError(
                f"stage {place[0]} replica {place[1]} updates {count} times, and replica 0 "
                f"{updates[place[0]]} times"
            )
    return sums


def _order(
    pipeline: Pipeline, actions: dict[StageReplica, tuple[Action, ...]], sums: Sums
) -> list[tuple[StageReplica, Action]]:
    position = dict.fromkeys(actions, 0)
    done: set[tuple[StageReplica, Action]] = set()
    order: list[tuple[StageReplica, Action]] = []

    def missing(place: StageReplica, action: Action) -> list[tuple[StageReplica, Action]]:
        if isinstance(action, Update):
            return [one for one in sums[place[0], action.number] if one not in done]
        senders = _senders(pipeline, place, action)
        return senders if done.isdisjoint(senders) else []

    total = sum(map(len, actions.values()))
    while len(order) < total:
        moved = False
        for place, own in actions.items():
            while position[place] < len(own):
                action = own[position[place]]
                if missing(place, action):
                    break
                done.add((place, action))
                order.append((place, action))
                position[place] += 1
                moved = True
        if not moved:
            place = next(p for p, own in actions.items() if position[p] < len(own))
            action = actions[place][position[place]]
            peer, awaited = missing(place, action)[0]
            raise PipelineError(
                f"deadlock: stage {place[0]} replica {place[1]} waits in {action} for {awaited} of "
                f"stage {peer[0]} replica {peer[1]}"
            )
    return order


def _check_fifo(pipeline: Pipeline, actions: dict[StageReplica, tuple[Action, ...]]) -> None:
    """Messages to a virtual stage from another rank are awaited in the order of their sending."""
    sent: dict[tuple[StageReplica, StageReplica, str, int], list[int]] = defaultdict(list)
    awaited: dict[tuple[StageReplica, StageReplica, str, int], list[int]] = defaultdict(list)
    for place, own in actions.items():
        for action in own:
            if isinstance(action, Update):
                continue
            kind = "activation" if isinstance(action, Forward) else "gradient"
            source, target = pipeline.beside(place[0], action)
            if source and source.place != place:
                virtual = pipeline.dealt[place[0]][action.chunk]
                awaited[source.place, place, kind, virtual].append(action.micro_batch)
            if target and target.place != place:
                sent[place, target.place, kind, target.virtual].append(action.micro_batch)
    for edge in sent.keys() | awaited.keys():
        if sent[edge] != awaited[edge]:
            raise PipelineError(
                f"stage {edge[0][0]} sends {edge[2]}s {sent[edge]} to stage {edge[1][0]}, "
                f"which awaits {awaited[edge]}"
            )


def _most_held(own: tuple[Action, ...]) -> int:
    held = most = 0
    for action in own:
        if isinstance(action, Forward):
            held += 1
            most = max(most, held)
        elif isinstance(action, (Backward, BackwardWeight)):
            held -= 1
    return most


def _ages(
    pipeline: Pipeline, actions: dict[StageReplica, tuple[Action, ...]]
) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    versions: dict[tuple[int, int], int] = {}
    staleness: dict[tuple[int, int], int] = {}
    for (stage, _), own in actions.items():
        updates = 0
        for action in own:
            if isinstance(action, Update):
                updates += 1
            elif isinstance(action, Forward):
                versions.setdefault((stage, action.micro_batch), updates)
            elif isinstance(action, (Backward, BackwardWeight)):
                item = (stage, action.micro_batch)
                staleness[item] = updates - versions[item]
    return versions, staleness
