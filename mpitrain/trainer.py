"""``mpitrain.Trainer``: train a program's own model on its own data in one call."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from types import MappingProxyType
from typing import Any, NoReturn

from mpi4py import MPI

from collectives import Communicator, check_launch
from mpitrain import extras
from mpitrain.config import Config, ConfigError
from mpitrain.data import program as own_data
from mpitrain.data.generators import kept_generators
from mpitrain.data.map_style import Collate
from mpitrain.metrics.records import Epoch, Record, Write
from mpitrain.normalise import normalise, ranks
from mpitrain.pipeline.runtime import Span, no_span
from mpitrain.ranks import GRACE_S
from mpitrain.ranks.stop import StopFlag, stop_flag
from mpitrain.ranks.threads import limit_blas_threads
from mpitrain.ranks.together import ClosedTogether, all_or_nobody, logged_once, together
from mpitrain.run import expect_asked, trained
from mpitrain.start import start
from mpitrain.training.assemble import Hooks
from mpitrain.training.loop import Loop
from mpitrain.training.parts import Parts
from mpitrain.user_objects import Given


class Trainer(ClosedTogether):
    """Trains a program's own model on its own data, in the layout that the job asks for.

        trainer = mpitrain.Trainer(
            model=lambda: torch.nn.Sequential(...), train_data=mine, test_data=others,
            loss=torch.nn.functional.mse_loss, metrics={"mae": mae}, batch_size=48, epochs=3,
            parallel={"pipe": 2}, optim={"name": "adamw", "lr": 3e-3},
        )
        history = trainer.fit()

    Use it in a ``with`` statement, or call :meth:`close`.  All methods are collective.

    Attributes:
        loop: takes the steps.
    """

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
        cuts: str | Sequence[str] = (),
        splits: Mapping[str, str] = MappingProxyType({}),
        schedule: Any = None,
        classes: int = 0,
        collate_fn: Collate | None = None,
        clients: Any = None,
        span: Span = no_span,
        stop: StopFlag | None = None,
        before_step: Callable[[Parts], None] | None = None,
        **settings: Any,
    ) -> None:
        """Make the job from the arguments; missing ones come from ``config`` or the defaults.

        Args:
            comm: the ranks; all by default.
            config: the job before ``settings``; the defaults of a job file if it is left out.
            model: layers by name, a ``torch.nn.Module``, or a function that makes one of them.  A
                function is called with torch's generator seeded by ``run.seed``.  A pipeline
                spreads the parts of a ``torch.nn.Sequential`` over its stages.  Parameters that
                need no gradient stay as they are.
            cuts: for any other module, names of its modules behind which it may be cut into stages,
                in the order of their calls; or the name of a list of modules, as
                ``"encoder.layers"``.
            splits: with ``parallel.tensor``, how the ranks share matrices of a torch module, by
                names or their ends: ``"columns"``, ``"columns of 3"`` where three matrices lie side
                by side, ``"rows"``, or ``"number"`` for an attribute that counts what is shared.
                GPT-2, LLaMA, Mistral, Qwen2, BERT and ViT of ``transformers`` need none.
            train_data, test_data: data sets with ``len(data)`` samples ``data[i]``, each a pair of
                an input and a label; what follows, such as a weight, is a further argument of loss
                and metrics.  Each rank reads only its own samples; random changes of a sample
                follow from seed, epoch and ``i`` (:class:`mpitrain.data.map_style.OwnSamples`).  Or
                iterables with a length, which are read in their own order
                (:class:`mpitrain.data.stream.Streamed`), or a ``DataLoader`` of either, from which
                size and order of the batches, and ``collate_fn``, are taken.  Without ``test_data``
                nothing is tested, and settings that need tests are refused.  Integer inputs become
                floating point, but for a torch module, and layers that begin with a table
                (``choices`` of :class:`mpitrain.nn.Layer`).
            collate_fn: makes a batch of a list of samples, as by padding, for each micro-batch
                anew.  Model and loss must leave the padding out: where two samples' joint loss
                differs from their separate ones, all ranks refuse it.
            loss: a function of torch tensors that returns the mean over its samples, or
                ``(sum, count)``: the sum over counted items and their number, which the trainer
                averages over all ranks and micro-batches, or a list of these, whose
                counts follow from the labels; one of torch's losses, with
                ``ignore_index``, ``weight`` and ``reduction="sum"``; a
                :class:`mpitrain.objective.LossFunction`; a name as in ``loss.name``; or
                ``"model"``, the loss that a torch module computes itself, as ``transformers`` do.
            metrics: functions of torch tensors that return means over samples or ``(sum, count)``,
                :class:`mpitrain.AllSamples` of others, or
                :class:`~mpitrain.objective.metrics.Metric`, by name; or names as in
                ``evaluate.metrics``.
            optimizer: a function that makes an optimiser of torch from parameters, such as
                ``lambda p: torch.optim.AdamW(p, lr=3e-3)``, with one or several groups; an
                :class:`mpitrain.optim.optimizers.Optimizer`; or a name as in ``optim.name``.  The
                ``lr`` of a function's optimiser is the base rate of schedules, for batches of any
                size, unless ``optim.lr`` or ``optim.reference_batch`` is set.
            schedule: a function of the step, counted from 0, whose value is the factor on the rate,
                as in torch's LambdaLR.  With an optimiser of torch it may be a function that makes
                a scheduler, such as ``lambda optimizer: CosineAnnealingLR(optimizer, 100)``.  The
                scheduler takes a step after each training step, or with ``schedule_by="epoch"``
                after each epoch.  Or a name as in ``optim.schedule``, such as ``"cosine"``, which
                goes with ``warmup_steps``.
            classes: number of classes, if labels are integers; by default the number of scores of
                the model's last layer, or 0 if there is a label for each number of the outputs.
            clients: the client of each training sample, a whole number or a text, or a function of
                ``train_data`` that gives them, for ``split = "own"`` of [federated] or [sync].
            span, stop, before_step: see :class:`mpitrain.training.assemble.Hooks`.
            settings: keys that only one of the job file's tables has (``batch_size=48``,
                ``epochs=3``, ``seed=7``), and whole tables (``parallel={"pipe": 2}``).  For a torch
                module, ``dtype`` is by default the type of its parameters.

        Raises:
            TypeError: on all ranks: a keyword is not a setting.
            LaunchError: a launcher has started more processes than MPI sees.
            ConfigError, DataError: as :func:`mpitrain.training.assemble.assemble`.
        """
        check_launch()  # before the program's functions are called
        whole = ranks(comm)
        given = Given(
            model=model, train_data=train_data, test_data=test_data, loss=loss, metrics=metrics,
            optimizer=optimizer, cuts=cuts, splits=splits, schedule=schedule,
            classes=classes, collate_fn=collate_fn, clients=clients,
        )  # fmt: skip
        # The program may fail on one rank.
        with kept_generators(), logged_once(whole), all_or_nobody(whole):
            job, objects, module = normalise(whole, config, given, settings)
            before_step = before_step and self._followed(before_step)
            hooks = Hooks(span=span, stop=stop, before_step=before_step)
            self.loop: Loop = start(whole, job, objects, **hooks)
        self._whole, self._job, self._objects, self._hooks = whole, job, objects, hooks
        self._own = None if module is None else extras.OwnModule(module)

    @property
    def module(self) -> Any:
        """The torch module that was given or made; ``None`` for layers.

        It has the trained values after :meth:`fit`, and those of the moment after :meth:`gather`.

        Raises:
            RuntimeError: steps were taken since.  While ``on_record`` runs, each access to the
                module's values raises it.
        """
        return self._own and self._own.current(self.parts)

    def gather(self) -> Any:
        """Give :attr:`module` the values of this moment, and return it; collective.

        With ``optim.average`` these are the averages.  ``on_record`` may call it, on all ranks,
        when it sees a ``Step`` or an ``Epoch``: for a running mean, for texts of a language model,
        for a file.  Where records come late (asynchronous schedules, servers, ``sync.agree``), the
        values are newer than the record.  Costs a message of all parameters, and a copy of them.

        Raises:
            ConfigError: on all ranks: some of them did not call it in ``on_record``, or the model
                is no torch module.
            RuntimeError: the trainer is closed, or ``on_record`` sees another record.
        """
        self.parts.expect_open()
        if self._own is None:
            raise ConfigError("gather(): the model is no torch module")
        return self._own.gather(self.parts)

    @property
    def parts(self) -> Parts:
        """The job on this rank."""
        return self.loop.parts

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self.parts.comm

    @property
    def config(self) -> Config:
        """The job."""
        return self.parts.config

    @property
    def layers(self) -> list[str]:
        """Names of this rank's layers."""
        return self.parts.layers

    def steps(self, epoch: int) -> Generator[Sequence[Record]]:
        """Take the steps of an epoch, as :meth:`mpitrain.training.loop.Loop.steps`."""
        with closing(self.loop.steps(epoch)) as steps:
            for records in steps:
                with self._handing_on():
                    yield records
                if self._own:
                    self.parts.asked.agree(self.comm)

    def run_epoch(self, epoch: int) -> Iterator[Record]:
        """Take the steps of an epoch, as :meth:`mpitrain.training.loop.Loop.run_epoch`."""
        for records in self.steps(epoch):
            yield from records

    def torch_optimizer(self) -> Any:
        """The optimiser of torch over :attr:`module`, with the state and the rates of training.

        A loop of torch goes on with both; ``optimizer=lambda p: that`` begins another trainer with
        them.  The module gets the trained values.  Collective; costs the whole state on each rank.

        Raises:
            ConfigError: on all ranks: ``optimizer=`` makes none of torch, or the module has
                averages, to which the state does not belong.
            RuntimeError: the trainer is closed.
        """
        self.parts.expect_open()
        if self._own is None:
            raise ConfigError("torch_optimizer(): the model is no torch module")
        from mpitrain.adapters.torch.functions.optimizer_state import handed_over

        found = handed_over(self.parts, self._own.module)
        self._own.load(self.parts)
        return found

    def end(self, reason: str) -> None:
        """End training after the last step; call it on all ranks while ``on_record`` runs.

        ``fit()`` tests, saves and returns then; ``fit(resume=True)`` goes on from there.

        Args:
            reason: some words, for the summary.

        Raises:
            ValueError: there is no reason.
            RuntimeError: ``on_record`` does not run.
        """
        self.parts.asked.set_end(reason)

    def save(self) -> None:
        """Save a checkpoint of the last step; call it on all ranks while ``on_record`` runs.

        Raises:
            RuntimeError: ``on_record`` does not run.
        """
        self.parts.asked.expect_open()
        self.parts.asked.save = True

    @property
    def rate_factor(self) -> float:
        """Factor on the learning rates of all steps to come, which checkpoints keep.

        Set it on all ranks while ``on_record`` runs.  Setting it raises RuntimeError elsewhere, and
        ValueError for a number that is not finite or below 0.
        """
        return self.parts.asked.factor

    @rate_factor.setter
    def rate_factor(self, factor: float) -> None:
        self.parts.asked.set_factor(factor)

    def __reduce__(self) -> NoReturn:
        """Raises TypeError: communicators are neither copied nor kept in files."""
        raise TypeError(
            "a Trainer is bound to its ranks, and is neither copied nor pickled; copy or save its "
            "module, or go on from its checkpoints: make another one and call fit(resume=True)"
        )

    def close(self) -> None:
        """Free the communicators; a second call does nothing.

        Raises:
            RuntimeError: ``on_record`` runs.
        """
        self._expect_outside("close()")
        self.loop.close()

    def _handing_on(self) -> AbstractContextManager[None]:
        return self._own.handing_on(self.parts) if self._own else nullcontext()

    def _followed(self, before_step: Callable[[Parts], None]) -> Callable[[Parts], None]:
        def run(parts: Parts) -> None:
            with self._handing_on():
                before_step(parts)

        return run

    def _expect_outside(self, what: str) -> None:
        """Raise RuntimeError while ``on_record`` runs."""
        if self.parts.asked.seen is not None:
            raise RuntimeError(
                f"{what} while on_record runs: call end(reason) there, and {what} after fit()"
            )

    def _take_saved_stages(self) -> None:
        """Make the loop anew if the newest checkpoint has other stages; collective."""
        job = extras.saved_stages(self.comm, self._job, self.config)
        if job is None:
            return
        self.loop.close()
        with all_or_nobody(self._whole):
            self.loop = start(self._whole, job, self._objects, **self._hooks)

    def fit(
        self,
        *,
        resume: bool = False,
        allow_changes: bool = False,
        on_record: Write | None = None,
    ) -> list[Epoch]:
        """Train to the end, as :func:`mpitrain.train`; collective.

        Args:
            resume: go on from the newest checkpoint in ``run.dir``, if there is one.  With
                ``partition="auto"`` and ``links``, stages and replicas are those of the checkpoint:
                :attr:`loop` and :attr:`parts` are new ones if ``profile`` has changed.
            allow_changes: accept the checkpoint of another job, for example with another loss or
                other frozen values, as far as it fits.
            on_record: function that each rank calls with each record of
                :mod:`mpitrain.metrics.records`, which is the same on all ranks: a ``Start`` first,
                a ``Step`` after a step, an ``Epoch`` after a test, and others.  It may call
                :meth:`end`, :meth:`save` and :meth:`gather` and set :attr:`rate_factor` and
                attributes of the module, as a temperature, alike on all ranks.  Costs a small
                message a step.

        Returns:
            The tests, in order, on all ranks; none without ``test_data``.

        Raises:
            ConfigError: on all ranks: ``module`` was given other values or hooks on gradients after
                the trainer was made, which would be lost.
            Stopped: on all ranks: SIGTERM, SIGUSR1, the first SIGINT or the end of the SLURM job's
                time has stopped one of them; exit status 75 if nobody catches it.  Only the main
                thread receives signals.
            TypeError: on all ranks: an argument is of another kind.
            Exception: on all ranks, as :func:`mpitrain.train`.  An error that a model or a loss
                raises on one rank alone ends the job, even if the program would catch it.
        """
        self._expect_outside("fit()")
        flags = {"fit(resume)": resume, "fit(allow_changes)": allow_changes}
        expect_asked(self.parts, flags, on_record)
        if self._own:
            together(self.comm, self._own.begin, ConfigError)
        if resume:
            self._take_saved_stages()
        parts = self.parts
        if on_record and self._own:
            on_record = self._own.watched(on_record, parts)
        given = parts.stop
        with all_or_nobody(self.comm):
            try:
                with (
                    stop_flag(GRACE_S, self.comm, beside=given) as parts.stop,
                    limit_blas_threads(self.comm),
                ):
                    _, tests = trained(
                        self.loop, resume, allow_changes, on_record, "fit(resume=True)"
                    )
            finally:
                parts.stop = given
            if self._own:
                self._own.load(parts)
        return tests
