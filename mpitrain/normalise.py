"""Turn the arguments of :class:`mpitrain.Trainer` into a job and objects for its parts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from mpi4py import MPI

from mpitrain import extras, nn, user_objects
from mpitrain.config import Brought, Config, ConfigError, Optim, configured, expect_job, expect_read
from mpitrain.config.conflicts import expect, tables_of
from mpitrain.config.tables import SettingError
from mpitrain.config.unread import readers
from mpitrain.data import DataError, loaders
from mpitrain.data import program as own_data
from mpitrain.fields import as_given
from mpitrain.ranks.same import expect_same_job, name_of
from mpitrain.ranks.together import together
from mpitrain.training.parts import UserObjects
from mpitrain.user_objects import Given

#: Stands for the name of an object until it is known.
_GIVEN = "given"

_Kind = tuple[Callable[[Any], bool], str]
_DATA: _Kind = (
    lambda one: not isinstance(one, str | type),
    "a data set that is made, as Mine() (its name alone is data={'name': 'digits'})",
)
_NAMES: _Kind = (lambda one: isinstance(one, Iterable), "names of modules, as ['encoder.layers']")
#: Kinds of arguments of the program, by a test and in words.
_KINDS: Mapping[str, _Kind] = {
    "train_data": _DATA,
    "test_data": _DATA,
    "loss": (
        lambda one: callable(one) or hasattr(one, "expect"),
        "a function of outputs and labels, as torch.nn.functional.mse_loss",
    ),
    "cuts": _NAMES,
    "splits": (lambda one: isinstance(one, Mapping), "ways by names, as {'up': 'columns'}"),
    "classes": (lambda one: hasattr(one, "__index__"), "how many classes, as 10"),
    "collate_fn": (callable, "a function of a list of samples"),
}


def ranks(comm: Any) -> MPI.Intracomm:
    """The job's ranks: all of them if ``comm`` is None.

    Raises:
        TypeError: ``comm`` is something else, as a model that was not given by its name.
    """
    whole = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(whole, MPI.Intracomm) or whole == MPI.COMM_NULL:
        raise TypeError(
            f"comm: expected the ranks, as MPI.COMM_WORLD, got {_described(comm)}; give a model, "
            "data and settings by name, as Trainer(model=net, train_data=data)"
        )
    return whole


def normalise(
    comm: MPI.Intracomm, config: Config | None, given: Given, settings: Mapping[str, Any]
) -> tuple[Config, UserObjects, Any]:
    """The job, its objects, and the torch module, if the model is one; collective.

    Args:
        comm: the job's ranks.
        config: the job before ``settings``; ``None``: the defaults.
        given: objects of the program, or names in their place.
        settings: keys that only one table of a job has, and whole tables.

    Raises:
        TypeError, ConfigError, DataError: on all ranks: a keyword is no setting; a value is not
            allowed, or conflicts with another one; the data cannot be read, or differ.
    """
    given, asked, job = together(
        comm, lambda: _asked(config, given, settings), ConfigError, DataError, TypeError
    )
    schedule, grouping, options = given.schedule, None, dict[str, object]()
    train, test = given.train_data, given.test_data
    module, layers = user_objects.model(given, job.run.seed, lambda: own_data.first(job, train))
    optimizer = given.optimizer
    if given.makes_optimizer:
        groups, grouping, options = user_objects.optimizer(optimizer, module, layers, job)
        optimizer = groups[0]
        if schedule is not None:
            schedule = extras.TorchSchedule(schedule, groups)
        rates = {"lr": optimizer.lr, "reference_batch": 0}
        job = configured(job, {"optim": rates | _asked_of_optim(config, asked)})
    if optimizer is not None:
        user_objects.expect_without_momentum(job, optimizer)
    if module is not None:
        job = configured(job, user_objects.types(module, layers or {}, job, asked))
    named = {
        "model": module, "loss": given.loss, "optimizer": optimizer, "schedule": given.schedule,
        "clients": given.clients,
    }  # fmt: skip
    job = _with_names(job, named, given)
    in_place_of = {"own.model": given.model, "own.data": train and train.data}
    kinds = {key: name_of(one) for key, one in in_place_of.items() if one is not None}
    brought = Brought(kinds, config or Config())
    together(comm, lambda: expect_read(job, brought), ConfigError)
    has = {key: getattr(given, key) is not None for key in ("train_data", "test_data")}
    besides = options | user_objects.kinds(module) | has | {"classes": given.classes}
    expect_same_job(comm, job, besides)
    data = own_data.given(comm, job, train, test, layers, given.classes)
    function = user_objects.over_parts if data and data.in_turn else lambda given: given
    last: Any = list(layers.values())[-1] if layers else None
    own = layers if layers and module is not None else {}
    form = getattr(last, "formed", as_given)
    loss, metrics = user_objects.loss(function(given.loss), form, own), None
    if isinstance(given.metrics, Mapping):
        is_torch = module is not None
        metrics = {
            name: user_objects.metric(function(one), name, form, is_torch=is_torch)
            for name, one in given.metrics.items()
        }
    names: Mapping[str, str] = {}
    shadow = None
    if module is not None:
        names = extras.names_in(module, layers or {})
        if layers and given.loss is user_objects.own_loss and metrics is None:
            last.give_only_loss()
        if job.run.shadow and not comm.rank:
            factory = given.optimizer if given.makes_optimizer else None
            shadow = extras.Shadow(module, layers or {}, factory, given.schedule)
    objects = UserObjects(
        data, layers, loss, metrics, optimizer, grouping, schedule, shadow, names, given.clients
    )
    return job, objects, module


def _asked(
    config: Config | None, given: Given, settings: Mapping[str, Any]
) -> tuple[Given, dict[str, Any], Config]:
    """The program's objects, the settings, and this rank's job, before any object is used."""
    usual = Config() if config is None else config
    expect_job(usual)
    if hasattr(given.schedule, "last_epoch"):
        raise ConfigError(
            "schedule: give a function that makes the scheduler of an optimiser, as lambda "
            f"optimizer: {type(given.schedule).__name__}(optimizer, ...), not the scheduler"
        )
    given, asked = names_as_settings(given, settings)
    for key, (fits, words) in _KINDS.items():
        if (one := getattr(given, key)) is not None and not fits(one):
            raise ConfigError(f"{key}: expected {words}, got {_described(one)}")
    given = _taken(given)
    if not hasattr(asked.get("layers", 0), "__index__"):
        raise ConfigError(
            "layers: this is model.layers, the number of blocks of a gpt; give layers of "
            'your own as model={"name": layer, ...}, or a torch module as model=module'
        )
    of_rules = {key for table, key, by in readers() if (table, by.key) == ("optim", "name")}
    useless = (of_rules | {"name", "groups"}) & set(_asked_of_optim(config, asked))
    if given.makes_optimizer and useless:
        raise ConfigError(
            f"optim: {', '.join(sorted(useless))} would have no effect on the optimiser that "
            "optimizer= makes; set them there"
        )
    # The checks below look for conflicts with these.
    own = {
        key: getattr(usual.own, key) or _GIVEN
        for key in ("optimizer", "schedule")
        if getattr(given, key) is not None
    }
    if own:
        asked["own"] = own | asked.get("own", {})
    try:
        job = configured(usual, asked)
    except ConfigError:
        if given.model is not None:
            _expect_axes_of_own(asked)
        raise
    if given.train_data is not None:
        job = configured(job, loaders.settings(given.train_data, asked, job.train, job.data))
    _expect_given(job, given)
    return given, asked, job


def _described(given: Any) -> str:
    """An argument, for a message."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return repr(given) if isinstance(given, str | int | float) else f"a {type(given).__name__}"


def _expect_axes_of_own(asked: Mapping[str, Any]) -> None:
    """Raise ConfigError for an axis that no model of the program has, whatever kind a job names."""
    axes = {**asked.get("parallel", {}), **asked}
    for key in ("context", "sequence"):
        if isinstance(value := axes.get(key), int):
            expect(tables_of({"own.model": _GIVEN, f"parallel.{key}": value}))


def _taken(given: Given) -> Given:
    """The objects, with DataLoaders taken apart."""
    data = {key: getattr(given, key) for key in ("train_data", "test_data")}
    if given.collate_fn is not None and data["train_data"] is None:
        raise SettingError("collate_fn without train_data: nothing is collated; give both")
    found: dict[str, Any] = {
        key: loaders.taken(key, one, given.collate_fn)
        for key, one in data.items()
        if one is not None
    }
    return replace(given, **found)


def names_as_settings(given: Given, settings: Mapping[str, Any]) -> tuple[Given, dict[str, Any]]:
    """Move arguments that are names or tables, and no objects, to the settings of that meaning."""
    asked = dict(settings)
    if given.loss == "model":
        given = replace(given, loss=user_objects.own_loss)
    if isinstance(given.loss, str | Mapping):
        asked["loss"] = {"name": given.loss} if isinstance(given.loss, str) else given.loss
        given = replace(given, loss=None)
    parts = given.model.values() if isinstance(given.model, Mapping) else ()
    if parts and not any(isinstance(part, nn.Layer) for part in parts):
        asked["model"] = given.model
        given = replace(given, model=None)
    if isinstance(given.metrics, str) or not isinstance(given.metrics, Iterable | None):
        raise ConfigError(
            "metrics: expected functions by their names, or a list of names, as ['mae'], got "
            f"{given.metrics!r}"
        )
    if given.metrics is not None and not isinstance(given.metrics, Mapping):
        asked["evaluate"] = {**asked.get("evaluate", {}), "metrics": list(given.metrics)}
        given = replace(given, metrics=None)
    if isinstance(given.optimizer, str):
        asked["optim"] = {"name": given.optimizer, **asked.get("optim", {})}
        given = replace(given, optimizer=None)
    if given.schedule is not None and not callable(given.schedule):
        asked["optim"] = {"schedule": given.schedule, **asked.get("optim", {})}
        given = replace(given, schedule=None)
    return given, asked


def _expect_given(job: Config, given: Given) -> None:
    """Raise ConfigError if the program gave no object for a key of [own]."""
    if ("own" in (job.federated.split, job.sync.split)) != (given.clients is not None):
        raise ConfigError(
            "own.clients: the client of each sample goes with split = 'own' of [federated] or "
            "[sync], and this with that; set both, or none"
        )
    for key in ("model", "data", "loss", "metrics", "optimizer", "schedule", "clients"):
        keyword = "train_data" if key == "data" else key
        if getattr(given, keyword) is None and getattr(job.own, key):
            raise ConfigError(
                f"own.{key} = {getattr(job.own, key)!r}: a job file that names it is run by "
                f"mpitrain train; here, give {keyword}= itself, or leave it out of [own]"
            )


def _asked_of_optim(config: Config | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [optim] that the program sets: those in ``settings``, and the rate of ``config``."""
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


def _with_names(job: Config, objects: Mapping[str, Any], given: Given) -> Config:
    """The job with the names of the objects; a resumed run must have the same names."""
    names = {
        key: name_of(what)
        for key, what in objects.items()
        if what is not None and getattr(job.own, key) in ("", _GIVEN)
    }
    own = msgspec.structs.replace(
        job.own,
        **names,
        cuts=given.cuts if isinstance(given.cuts, str) else tuple(given.cuts or ()),
        splits=dict(given.splits or {}),
    )
    return msgspec.structs.replace(job, own=own)
