"""Pipeline schedules: proved, timed against their formulas, and broken on purpose."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.config import Config, ConfigError, Parallel, Train
from mpitrain.parallel.grid import Layout
from mpitrain.pipeline import draw
from mpitrain.pipeline.actions import Backward, BackwardWeight, Forward, Pipeline, Update, vee
from mpitrain.pipeline.replay import PipelineError, replay
from mpitrain.pipeline.schedules import SCHEDULES
from mpitrain.pipeline.simulate import PassTimes, balanced, simulate
from mpitrain.training.partition import schedule_of
from tests.cases import slow_case

NAMES = list(SCHEDULES)


def pipeline(name, p, m, v=2):
    return SCHEDULES[name].pipeline((1,) * p, m, v)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_held_is_what_was_published(name):
    schedule = SCHEDULES[name]
    for p, rounds in product((1, 2, 3, 4, 7, 8), (1, 2, 5)):
        m = p * rounds
        shape = pipeline(name, p, m)
        report = replay(schedule.generate, shape)
        for (stage, _), held in report.held.items():
            assert held <= schedule.held(p, m, shape.chunks, stage)
        if schedule.synchronous:  # the pipeline drains, and weights have no age
            assert set(report.staleness.values()) == {0}
        if name != "zero_bubble" and not (name == "dualpipe_v" and rounds < 2):
            assert max(report.held.values()) == schedule.held(p, m, shape.chunks, 0)


@pytest.mark.parametrize("name", NAMES)
def test_bubbles_are_those_of_the_formulas(name):
    schedule, chunks = SCHEDULES[name], (1, 2, 3) if name == "interleaved" else (1,)
    several = [(1, 1, 1), (1, 1, 3), (3, 1, 0.5), (1, 3, 3), (0.5, 2, 1)]
    times = several[: 1 if schedule.placement is vee else None]
    for p, rounds, v, passes in product((1, 2, 4, 7), (1, 2, 4), chunks, times):
        m = p * max(rounds, schedule.fills)
        shape = schedule.pipeline((1,) * p, m, v)
        found = simulate(schedule.generate, shape, balanced(shape, PassTimes(*passes))).bubble
        assert found == pytest.approx(schedule.bubble(p, m, v, *passes), abs=1e-12)


@given(
    name=st.sampled_from([n for n in NAMES if SCHEDULES[n].chunks == 1]),
    replicas=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    rounds=st.integers(1, 3),
)
@settings(max_examples=150, deadline=None)
def test_stages_of_unequal_width_work(name, replicas, rounds):
    shape = Pipeline(tuple(replicas), rounds * math.lcm(*replicas))
    report = replay(SCHEDULES[name].generate, shape)
    done = [a for _, a in report.order if isinstance(a, (Backward, BackwardWeight))]
    assert len(done) == shape.micro_batches * shape.stages


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_schedule_is_refused(name):
    """Every action left out, and every two neighbours swapped, on every rank."""
    shape = pipeline(name, 3, 6)
    generate = SCHEDULES[name].generate
    harmless = 0
    for place in shape.places():
        actions = list(generate(shape, *place))
        for index in range(len(actions)):
            dropped = actions[:index] + actions[index + 1 :]
            with pytest.raises(PipelineError):
                replay(altered(generate, place, dropped), shape)
        for index in range(len(actions) - 1):
            a, b = actions[index : index + 2]
            swapped = [*actions[:index], b, a, *actions[index + 2 :]]
            try:
                replay(altered(generate, place, swapped), shape)
                harmless += 1
                assert may_swap(a, b), (place, a, b)
            except PipelineError:
                pass
    assert harmless  # a forward and a backward pass of different micro-batches may change places


def altered(generate, place, actions):
    def other(shape, stage, replica):
        return iter(actions) if (stage, replica) == place else generate(shape, stage, replica)

    return other


def may_swap(a, b):
    """Whether two neighbours touch different things, so that their order says nothing."""
    if isinstance(a, Update) or isinstance(b, Update):
        return True  # it is another schedule, on weights of another age
    same_kind = type(a) is type(b) and a.chunk == b.chunk and not isinstance(a, BackwardWeight)
    return (a.micro_batch, a.chunk) != (b.micro_batch, b.chunk) and not same_kind


def written(*rows):
    """A schedule by the forward passes, backward passes and updates of each place in turn."""
    kinds = {"F": Forward, "B": Backward, "U": Update}

    def generate(pipeline, *place):
        row = rows[[*pipeline.places()].index(place)]
        return (kinds[word[0]](int(word[1:])) for word in row.split())

    return generate


#: Two replicas, which take turns.
TURNS = "F0 B0 U0 F2 B2 U1", "F1 B1 U0 F3 B3 U1"
MISTAKES = [
    ((1, 1), ["F0 F0 F1 B0 B1 U0"] * 2, "forward pass of micro-batch 0 .* not 2 times"),
    ((1, 1), ["F0 B0 F1 B1 U0", "F1 F0 B0 B1 U0"],
     "deadlock: stage 0 replica 0 waits in B0 for B0 of stage 1"),
    ((1, 1), ["F0 F1 B0 B1 U0", "F1 F0 B0 B1 U0"],
     r"stage 0 sends activations \[0, 1\].*awaits \[1, 0\]"),
    # It needs micro-batch 2 before it gives back 1.
    ((2, 1), [*TURNS, "F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 B3 U3"],
     "waits in U0 for B1 of stage 0 replica 1"),
]  # fmt: skip


@pytest.mark.parametrize(("replicas", "rows", "why"), MISTAKES)
def test_waits_messages_that_overtake_and_repeated_passes_are_named(replicas, rows, why):
    with pytest.raises(PipelineError, match=why):
        replay(written(*rows), Pipeline(replicas, 2 * replicas[0]))


def test_replicas_wait_for_each_other_in_sums():
    rows = [*TURNS, "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3"]
    ends = [((0, 0), Backward(2)), ((0, 1), Backward(3))]
    assert replay(written(*rows), Pipeline((2, 1), 4)).sums[0, 1] == ends


def test_the_age_of_weights_without_draining():
    report = replay(SCHEDULES["asynchronous"].generate, Pipeline((1,) * 4, 12))
    for stage in range(4):
        ages = [report.staleness[stage, m] for m in range(12)]
        assert ages[4:] == [3 - stage] * 8  # PipeDream: p - 1 - s in the steady state
        assert max(ages) == 3 - stage
    assert [report.versions[0, m] for m in range(8)] == [0, 0, 0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("replicas", [(2, 1, 1), (3, 1), (1, 2, 1), (7, 1), (9, 5, 1, 1)], ids=str)
def test_replicas_of_unequal_stages_are_never_idle_once_the_pipeline_is_full(replicas):
    """Stages of r replicas take r times as long; replicas wait for each other in their sums."""
    each = math.lcm(*replicas)
    runs = [Pipeline(replicas, each * count) for count in (6, 12)]
    generate = SCHEDULES["asynchronous"].generate
    few, many = (simulate(generate, run, balanced(run, PassTimes())).seconds for run in runs)
    assert many - few == 3 * 6 * each


def test_slow_messages_and_slow_stages_take_their_time():
    shape = Pipeline((1, 1), 1)
    generate = SCHEDULES["gpipe"].generate
    assert simulate(generate, shape, PassTimes(1, 1, 1, message=5)).seconds == 1 + 5 + 1 + 2 + 5 + 2
    slow = simulate(generate, shape, [PassTimes(1, 1, 1), PassTimes(10, 1, 1)])
    assert slow.seconds == 1 + 10 + 2 + 2
    assert slow.bubble == pytest.approx(1 - (3 + 12) / 30)


def test_text():
    shape = Pipeline((1, 1), 3)
    found = simulate(SCHEDULES["1f1b"].generate, shape, PassTimes(1, 1, 1))
    assert draw.text(found, shape, 1.0).splitlines() == [
        "   stage 0 F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2",
        "   stage 1 .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..",
    ]
    cut = SCHEDULES["interleaved"].pipeline((1, 1), 2, 2)
    found_cut = simulate(SCHEDULES["interleaved"].generate, cut, PassTimes(1, 1, 1))
    assert "F0.0 F1.0 F0.1 F1.1" in draw.text(found_cut, cut, 0.5)


@pytest.mark.parametrize(("name", "part"), [slow_case("v_half", 1 / 2), ("v_min", 1 / 3)])
def test_a_v_of_repeated_blocks_holds_a_part_of_what_1f1b_holds(name, part):
    for p in (*range(2, 9), 12):
        held = replay(SCHEDULES[name].generate, pipeline(name, p, 4 * p)).held
        assert part * p < max(held.values()) / 2 <= part * p + 1.34
        idle = simulate(SCHEDULES[name].generate, pipeline(name, p, 4 * p)).seconds - 12 * p
        assert 0 < idle < 0.85 * 3 * (p - 1)  # 1F1B's


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_summed_in_the_order_of_the_micro_batches(name):
    shape = pipeline(name, 4, 12)
    for place in shape.places():
        for chunk in range(shape.chunks):
            own = SCHEDULES[name].generate(shape, *place)
            sums = [a for a in own if isinstance(a, (Backward, BackwardWeight))]
            order = [a.micro_batch for a in sums if a.chunk == chunk]
            assert order == sorted(order) and len(order) == 12


@pytest.mark.parametrize(
    ("name", "chunks", "replicas", "why"),
    [
        ("interleaved", 2, (1, 3), "deadlock: .*; take 1f1b or zero_bubble for stages of unequal"),
        ("interleaved", 2, (1, 1), "multiples of the 2 stages, not 3; set train.micro_batches$"),
        ("zb_v", 1, (2, 1), "equally many replicas of each stage; take 1f1b or zero_.* for 2-1$"),
    ],
)
def test_a_schedule_that_does_not_fit_the_stages_says_what_to_set(name, chunks, replicas, why):
    parallel = Parallel(schedule=name, chunks=chunks, replicas=replicas)
    micro_batches = 3 if replicas == (1, 1) else 2
    job = Config(parallel=parallel, train=Train(micro_batches=micro_batches))
    with pytest.raises(ConfigError, match=why):
        schedule_of(job, SCHEDULES[name], Layout(replicas))
