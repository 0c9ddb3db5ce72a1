"""A drawn program, right and with a mistake, trained by plain torch and by the trainer."""

import contextlib
import io
import logging
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

import mpitrain
from mpitrain.config import ConfigError
from mpitrain.metrics.records import Step
from mpitrain.parallel.replicas import ReplicaMismatch
from tests.zoo.mistakes import KINDS
from tests.zoo.programs import Program, drawn

STEPS = 9
#: Differences that right programs may have, and wrong ones must have, relative to torch's numbers.
EQUAL, OTHER = 1e-10, 1e-7


class Trained(NamedTuple):
    """Losses of the steps and values of the module, or the error; why the shadow is off."""

    losses: Any
    values: dict[str, torch.Tensor]
    error: str = ""
    off: str = ""

    def apart(self, right: "Trained") -> float:
        """The largest difference; infinite where something is not finite, or lacks."""
        if len(self.losses) != len(right.losses):
            return np.inf
        pairs = [(one, right.values[name]) for name, one in self.values.items()]
        pairs.append(tuple(torch.tensor(one.losses).double() for one in (self, right)))
        far = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-2)) for a, b in pairs]
        return max(np.nan_to_num(far, nan=np.inf))


def _values(net: Any) -> dict[str, torch.Tensor]:
    every = net.state_dict().items()
    return {n: one.detach().double().clone() for n, one in every if one.is_floating_point()}


def plain(program: Program) -> Trained:
    """Result of plain torch in one process."""
    net, given = program.make(), program.given
    every = [p for p in net.parameters() if p.requires_grad]
    own = program.optimizer(every)
    scheduler = program.schedule(own) if program.schedule else None
    loss, losses, by_epoch = program.loss_of, list[float](), "schedule_by" in given
    loader = torch.utils.data.DataLoader(program.data(torch.float64), given["batch_size"])
    for batch in (batch for _ in range(STEPS) for batch in [*loader, None]):
        if batch is None:
            if scheduler and by_epoch:
                scheduler.step()
            continue
        if len(losses) == STEPS:
            break
        own.zero_grad()
        total = net(**batch)["loss"] if loss == "model" else loss(net(batch[0]), batch[1])
        total = total[0] / total[1] if isinstance(total, tuple) else total
        total.backward()
        if "clip_norm" in given:
            torch.nn.utils.clip_grad_norm_(every, given["clip_norm"])
        if "clip_value" in given:
            torch.nn.utils.clip_grad_value_(every, given["clip_value"])
        own.step()
        if scheduler and not by_epoch:
            scheduler.step()
        losses.append(float(total.detach()))
    return Trained(losses, _values(net))


def trained(comm: Any, folder: Path, program: Program, kind: torch.dtype, shadow: int) -> Trained:
    """Result of the trainer on these ranks; collective."""
    losses, given, off = list[float](), dict(program.given), list[str]()
    log = logging.getLogger("mpitrain")

    def watch(record: logging.LogRecord) -> bool:
        off.extend([record.getMessage()] * ("run.shadow is off" in record.msg))
        return False

    data = torch.utils.data.DataLoader(program.data(kind), given.pop("batch_size"))
    log.addFilter(watch)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = mpitrain.Trainer(
                comm, model=lambda: program.make(kind), train_data=data, loss=program.loss_of,
                optimizer=program.optimizer, schedule=program.schedule, steps=STEPS, epochs=STEPS,
                dtype=str(kind)[6:], dir=str(folder), log_every=1000, shadow=shadow, **given,
            )  # fmt: skip
            with trainer:
                trainer.fit(
                    on_record=lambda r: losses.append(r.loss) if isinstance(r, Step) else None
                )
    except (ConfigError, ReplicaMismatch) as error:
        return Trained([], {}, str(error) or "no words")
    finally:
        log.removeFilter(watch)
    return Trained(losses, _values(trainer.module), off="".join(off))


class Verdict(NamedTuple):
    """Outcome of a draw.

    Attributes:
        number, kind, words: of the draw, its mistake, and all that was drawn.
        right: what is wrong with the right program, or "".
        planted: "told", "told before", "silent", "agrees" or "told, agrees" (in these layouts).
        text: words of the error.
    """

    number: int
    kind: str
    words: str
    right: str
    planted: str
    text: str


def judge(comm: Any, folder: Path, seed: int, number: int, kind: str) -> Verdict:
    """Train a draw in plain torch and by the trainer, right and with a mistake; collective."""
    way = Random(f"{seed} {number} {kind}").randrange(len(KINDS[kind]))

    def made(is_planted: bool = False, micro_batches: int = 0) -> Program:
        rng = Random(f"{seed} {number}")
        program = drawn(rng)
        if is_planted:
            KINDS[kind][way](program)
            program.drops = False  # plain torch would draw other numbers
        if micro_batches and not program.has("batch norm") and kind != "norm held late":
            program.given["micro_batches"] = micro_batches
        if comm.size > 1:
            lay_out(program, rng.choice(({}, {"zero": 1}, {"zero": 3}, {"pipe": comm.size})))
        return program

    def run(program: Program, kind: torch.dtype = torch.float64, shadow: int = 8) -> Trained:
        return trained(comm, folder, program, kind, shadow)

    words = f"{' '.join(made().words)}, way {way}"
    return Verdict(number, kind, words, _right(made, run), *_planted(made, run))


def lay_out(program: Program, layout: dict[str, int]) -> None:
    """Let ranks train a program in this layout, by cuts behind the first parts for a pipe."""
    given = program.given
    given["parallel"] = given.get("parallel", {}) | layout
    program.words.append(str(layout))
    if "pipe" in layout and program.form != "sequential":
        given["cuts"] = [f"parts.{number}" for number in range(layout["pipe"] - 1)]


def _right(made: Callable[..., Program], run: Callable[..., Trained]) -> str:
    found, wanted = run(made()), plain(made())
    narrow = run(made(), torch.float32)
    if wrong := found.error or narrow.error:
        return f"false alarm{'' if found.error else ' in float32'}: {wrong}"
    if not made().has("dropout") and not (apart := found.apart(wanted)) <= EQUAL:
        return f"differs from plain torch by {apart:.1e}"
    return found.off or narrow.off


def _planted(made: Callable[..., Program], run: Callable[..., Trained]) -> tuple[str, str]:
    told, wanted = run(made(True)), plain(made(True))
    for micro_batches in (0, 3, 6):
        found = run(made(True, micro_batches), shadow=0)
        if found.error:
            return "told before", found.error
        if found.apart(wanted) > OTHER:
            return ("told" if told.error else "silent"), told.error or told.off
    return ("told, agrees" if told.error else "agrees"), told.error
