"""A job of one's own in one call: model, data, loss and metrics; the rest as in a job file."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, cast

import msgspec
from mpi4py import MPI

from collectives import check_launch
from mpitrain import brought, nn
from mpitrain.config import Brought, Config, ConfigError, Optim, Server, expect_read
from mpitrain.config.settings import configured
from mpitrain.data import program as own_data
from mpitrain.metrics import Epoch, Record
from mpitrain.pipeline.runtime import Span, no_span
from mpitrain.ranks.same import expect_same_job, name_of
from mpitrain.ranks.stop import StopFlag, stop_flag
from mpitrain.ranks.threads import limit_blas_threads
from mpitrain.ranks.together import all_or_nobody, together
from mpitrain.run import train
from mpitrain.server import HogwildTrainer, ServedTrainer
from mpitrain.training import trainer

#: Keys of [optim] that an optimiser of torch leaves to the job.
_BESIDE_AN_OPTIMIZER = {
    "lr", "reference_batch", "warmup_epochs", "schedule", "schedule_by", "milestones", "decay",
    "decay_epochs", "clip_norm", "average",
}  # fmt: skip

#: Stands for the name of an optimiser until it is known.
_GIVEN = "given"


class Trainer(trainer.Trainer):
    """:class:`mpitrain.training.trainer.Trainer` of what a program brings.

        trainer = mpitrain.Trainer(
            model=lambda: torch.nn.Sequential(...), train_data=mine, test_data=others,
            loss=torch.nn.functional.mse_loss, metrics={"mae": mae}, batch_size=48, epochs=3,
            parallel={"pipe": 2}, optim={"name": "adamw", "lr": 3e-3},
        )
        history = trainer.fit()

    Attributes:
        module: the torch module that was given or made, with the trained values after
            :meth:`fit`; ``None`` for layers.
    """

    def __new__(
        cls, comm: MPI.Intracomm | None = None, config: Config | None = None, **given: Any
    ) -> Self:
        """The kind of trainer that the job has, if it has servers."""
        kind: type[Trainer] = cls
        keys = {key: value for key, value in given.items() if key in Server.__struct_fields__}
        # What cannot be a table of servers, __init__ refuses on all ranks.
        with suppress(msgspec.ValidationError, TypeError, AttributeError):
            told = msgspec.to_builtins((config or Config()).server)
            server = msgspec.convert(told | keys | dict(given.get("server") or {}), Server)
            kind = trainer_of(server) if cls is Trainer else cls
        return cast(Self, super().__new__(kind))

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        config: Config | None = None,
        *,
        model: Any = None,
        train_data: own_data.Data | None = None,
        test_data: own_data.Data | None = None,
        loss: Any = None,
        metrics: Mapping[str, Any] | Sequence[str] | None = None,
        optimizer: Any = None,
        cuts: Sequence[str] = (),
        schedule: Any = None,
        classes: int = 0,
        span: Span = no_span,
        stop: StopFlag | None = None,
        before_step: Callable[[trainer.Trainer], None] | None = None,
        **settings: Any,
    ) -> None:
        """What is left out is what ``config`` names, or a job file's defaults.

        Args:
            comm: the ranks; all by default.
            config: where ``settings`` are put on top.
            model: layers by name, a ``torch.nn.Module``, or a function that makes one of them; it
                is called with torch's generator seeded by ``run.seed``.  The parts of a
                ``torch.nn.Sequential`` are spread over the stages of a pipeline; parameters that
                need no gradient stay as they are.
            cuts: of any other module, the names of modules in it behind which it may be cut
                between stages, in the order in which they are called.
            train_data, test_data: ``len(data)`` samples ``data[i]``, pairs of an input and a label;
                without ``test_data`` nothing is tested, and settings that go by tests are refused;
                each rank reads its own alone, and what is random in it follows from seed, epoch and
                ``i`` (:class:`mpitrain.data.own.Own`).  Or iterables with a length, which are read
                in their own order (:class:`mpitrain.data.stream.Streamed`).
            loss: a function of torch tensors that is the mean over its samples, a
                :class:`mpitrain.objective.Loss`, or a name as in ``loss.name``.
            metrics: functions of torch tensors, means as well, or
                :class:`~mpitrain.objective.metrics.Metric`, by name; or names as in
                ``evaluate.metrics``.
            optimizer: a function that makes an optimiser of torch of some parameters, as
                ``lambda p: torch.optim.AdamW(p, lr=3e-3)``, of one or several groups, an
                :class:`mpitrain.optim.optimizers.Optimizer`, or a name as in ``optim.name``.  Of a
                function, ``lr`` is the rate that schedules begin from, and batches of any size
                have, unless ``optim.lr`` or ``optim.reference_batch`` say otherwise.
            schedule: a function of the step, counted from 0, whose value the rate is multiplied by,
                as torch's LambdaLR has it (:class:`mpitrain.training.trainer.Trainer`); or, with an
                optimiser of torch, one that makes a scheduler of it, as ``lambda optimizer:
                CosineAnnealingLR(optimizer, 100)``, which takes a step after each of training, or
                with ``schedule_by="epoch"`` after each epoch.
            classes: kinds of labels, if these are integers; by default as many as the model's last
                layer has scores, or none where there is a label for each number of the outputs.
            span, stop, before_step: as :class:`mpitrain.training.trainer.Trainer`.
            settings: keys of the job file's tables that only one table has (``batch_size=48``,
                ``epochs=3``, ``seed=7``), and whole tables (``parallel={"pipe": 2}``).  Of a torch
                module, ``dtype`` is that of its parameters.

        Raises:
            TypeError: on all ranks: a keyword that is no setting.
            LaunchError: a launcher has started more processes than MPI sees.
            ConfigError, DataError: as :class:`mpitrain.training.trainer.Trainer`.
        """
        check_launch()  # before the program's functions are called
        whole = MPI.COMM_WORLD if comm is None else comm

        def asked() -> Config:
            """The job of this rank; arguments that stand for keys of its tables move there."""
            nonlocal model, loss, metrics, optimizer, schedule
            if isinstance(loss, str | Mapping):
                settings["loss"], loss = {"name": loss} if isinstance(loss, str) else loss, None
            if isinstance(model, Mapping) and model and not _is_of_layers(model):
                settings["model"], model = model, None
            if not hasattr(settings.get("layers", 0), "__index__"):
                raise ConfigError(
                    "layers: this is model.layers, the number of blocks of a gpt; give layers of "
                    'your own as model={"name": layer, ...}, or a torch module as model=module'
                )
            if metrics is not None and not isinstance(metrics, Mapping):
                settings["evaluate"] = {**settings.get("evaluate", {}), "metrics": list(metrics)}
                metrics = None
            if isinstance(optimizer, str):
                settings["optim"] = {"name": optimizer, **settings.get("optim", {})}
                optimizer = None
            if hasattr(schedule, "last_epoch"):
                raise ConfigError(
                    "schedule: give a function that makes the scheduler of an optimiser, as lambda "
                    f"optimizer: {type(schedule).__name__}(optimizer, ...), not the scheduler"
                )
            if schedule is not None and not callable(schedule):  # a name, which two tables have
                settings["schedule"], schedule = schedule, None
            usual = config or Config()
            if optimizer is not None and not hasattr(optimizer, "prepare"):
                asked_for = _asked_of_optim(config, settings)
                if useless := set(asked_for) - _BESIDE_AN_OPTIMIZER:
                    raise ConfigError(
                        f"optim: {', '.join(sorted(useless))} would have no part in what "
                        "optimizer= makes; give them to it there"
                    )
            if optimizer is not None:  # conflicts with its options are looked for below
                own = {"optimizer": usual.own.optimizer or _GIVEN}
                settings["own"] = own | settings.get("own", {})
            job = configured(usual, settings)
            brings = {
                "model": model,
                "data": train_data,
                "loss": loss,
                "metrics": metrics,
                "optimizer": optimizer,
                "schedule": schedule,
            }
            for key, what in brings.items():
                if what is None and getattr(job.own, key):
                    raise ConfigError(
                        f"own.{key} = {getattr(job.own, key)!r}: a job file that names it is run "
                        f"by mpitrain train; here, give {'train_data' if key == 'data' else key}= "
                        "itself, or leave it out of [own]"
                    )
            right = trainer_of(job.server)
            if not isinstance(self, right) or (
                right is Trainer and isinstance(self, ServedTrainer)
            ):
                raise ConfigError(
                    f"[server]: such a job is trained by mpitrain.fit.{right.__name__}; take that "
                    "one"
                )
            return job

        with all_or_nobody(whole):  # a program's functions, which may fail on one rank
            job = together(whole, asked, ConfigError, TypeError)
            grouping, options = None, dict[str, object]()
            self.module, layers = brought.model(model, job.run.seed, cuts, train_data)
            if optimizer is not None and not hasattr(optimizer, "prepare"):
                optimizer, grouping, schedule, options = brought.optimizer(
                    optimizer, schedule, self.module, layers
                )
                rates = {"lr": optimizer.lr, "reference_batch": 0}
                job = configured(job, {"optim": rates | _asked_of_optim(config, settings)})
            if optimizer is not None:
                brought.expect_without_momentum(job, optimizer)
            if self.module is not None and "dtype" not in {**settings.get("run", {}), **settings}:
                job = configured(job, {"dtype": brought.dtype(self.module, job.run.dtype)})
            own_names = {"model": self.module, "loss": loss, "optimizer": optimizer}
            job = _with_names(job, own_names, cuts)
            parts = {"own.model": model, "own.data": train_data}
            named = {key: name_of(one) for key, one in parts.items() if one is not None}
            expect_read(job, Brought(named, config or Config()))
            is_torch = self.module is not None
            judges = None
            if isinstance(metrics, Mapping):
                judges = {
                    name: brought.metric(one, name, is_torch) for name, one in metrics.items()
                }
            given = {"train_data": train_data is not None, "test_data": test_data is not None}
            kinds = brought.kinds(self.module)
            expect_same_job(whole, job, options | kinds | given | {"classes": classes})
            data = own_data.given(whole, job, train_data, test_data, layers, classes)
            if self.module is not None and cuts and data:
                together(
                    whole, lambda: brought.expect_same_parts(self.module, cuts, data), ConfigError
                )
            super().__init__(
                whole,
                job,
                data=data,
                layers=layers,
                loss=brought.loss(loss),
                optimizer=optimizer,
                grouping=grouping,
                schedule=schedule,
                span=span,
                stop=stop,
                before_step=before_step,
                metrics=judges,
            )
            if self.module is not None:
                self.names = brought.names(self.module, layers)
        #: Of the module's parameters, as the trainer took them; until it trains.
        self._taken: list[int] | None = self._versions()

    def _versions(self) -> list[int]:
        return [p._version for p in self.module.parameters()] if self.module is not None else []

    def _expect_taken(self) -> None:
        """The module's parameters are those that the trainer has."""
        if self._taken is None or self.module is None:
            return
        if self._taken != self._versions():
            raise ConfigError(
                "model: its parameters were given other values after the trainer was made, which "
                "has had them since then; load them before, as in the function that makes the model"
            )
        from mpitrain.adapters.torch.checks.module_class import hooked

        if name := hooked(self.module):
            raise ConfigError(
                f"model: {name} was given a hook on its gradient, which the trainer would not "
                "call; put it into the loss, or take mpitrain.adapters.torch.DataParallel"
            )

    def fit(self, *, resume: bool = False, allow_changes: bool = False) -> list[Epoch]:
        """Train to the end, as :func:`mpitrain.train`; collective.

        Args:
            resume: go on from the newest checkpoint in ``run.dir``, if there is one.
            allow_changes: go on with another job, too, as another loss or other frozen values, as
                far as the checkpoint fits it.

        Returns:
            The tests, in order, on all ranks; none without ``test_data``.

        Raises:
            ConfigError: on all ranks: values that were loaded into ``module`` after the trainer
                was made would be lost, and hooks that its parameters were given.
            Stopped: on all ranks: SIGTERM, SIGUSR1 or the end of the SLURM job's time has stopped
                one of them; exit status 75 where nobody catches it.  Signals are heard in the
                main thread alone.
            Exception: on all ranks, as :func:`mpitrain.train`.  What a model or a loss raises on
                one rank alone ends the job, whoever would catch it.
        """
        self.expect_open()
        together(self.comm, self._expect_taken, ConfigError)
        self._taken = None
        tests: list[Epoch] = []

        def tell(record: Record) -> None:
            if isinstance(record, Epoch):
                tests.append(record)

        given = self.stop
        with all_or_nobody(self.comm):
            try:
                with (
                    stop_flag(60.0, self.comm, beside=given) as self.stop,
                    limit_blas_threads(self.comm),
                ):
                    train(
                        self,
                        go_on=resume,
                        allow_changes=allow_changes,
                        tell=tell,
                        way="fit(resume=True)",
                    )
            finally:
                self.stop = given
            if self.module is not None:
                from mpitrain.adapters.torch import load_into

                load_into(self.module, self)
        return tests


class TrainerWithServers(ServedTrainer, Trainer):
    """The same for jobs with servers."""


class TrainerWithoutLocks(HogwildTrainer, Trainer):
    """The same for jobs with ``server.hogwild``."""


def trainer_of(server: Server) -> type[Trainer]:
    """The kind of trainer that a job with these servers has."""
    if server.hogwild:
        return TrainerWithoutLocks
    return TrainerWithServers if server.ranks else Trainer


def _asked_of_optim(config: Config | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the program says of [optim], as a table, by keywords, or of the rate in ``config``."""
    usual, given = Optim(), (config or Config()).optim
    found = {
        key: getattr(given, key)
        for key in ("lr", "reference_batch")
        if getattr(given, key) != getattr(usual, key)
    }
    for key, value in settings.items():
        if key in Optim.__struct_fields__:
            found[key] = value
        elif key == "optim":
            found |= value
    return found


def _is_of_layers(model: Mapping[str, Any]) -> bool:
    return any(isinstance(value, nn.Layer) for value in model.values())


def _with_names(job: Config, given: Mapping[str, Any], cuts: Sequence[str]) -> Config:
    """The job with the kinds of what was given in Python, which a resumed run must have, too."""
    names = {
        key: name_of(what)
        for key, what in given.items()
        if what is not None and getattr(job.own, key) in ("", _GIVEN)
    }
    own = msgspec.structs.replace(job.own, **names, cuts=tuple(cuts))
    return msgspec.structs.replace(job, own=own)
