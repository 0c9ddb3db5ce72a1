"""Turns a program's objects, such as torch modules and functions, into parts of a job."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any

from mpitrain import extras, nn
from mpitrain.arrays import Array
from mpitrain.config import Config, ConfigError
from mpitrain.objective import LossFunction
from mpitrain.objective.metrics import AllSamples
from mpitrain.ranks.same import name_of
from mpitrain.training.build import cut_by

if TYPE_CHECKING:
    from mpitrain.data.map_style import Collate
    from mpitrain.optim.groups import Grouping
    from mpitrain.optim.optimizers import Optimizer


@dataclass(frozen=True)
class Given:
    """Arguments of :class:`mpitrain.Trainer` that are objects of the program; see there."""

    model: Any = None
    train_data: Any = None
    test_data: Any = None
    loss: Any = None
    metrics: Mapping[str, Any] | Sequence[str] | None = None
    optimizer: Any = None
    cuts: str | Sequence[str] = ()
    splits: Mapping[str, str] = field(default_factory=dict)
    schedule: Any = None
    classes: int = 0
    collate_fn: "Collate | None" = None
    clients: Any = None

    @property
    def makes_optimizer(self) -> bool:
        """Whether the optimiser is a function that makes an optimiser of torch."""
        return self.optimizer is not None and not hasattr(self.optimizer, "prepare")


def model(
    objects: Given, seed: int, inputs: Callable[[], Array]
) -> tuple[Any, Mapping[str, nn.Layer] | None]:
    """The torch module, or None for layers; and the layers by name, or None if [model] names them.

    Args:
        objects: a module, layers by name, or a function that makes one of them, and the names of
            the module's parts where it may be cut and shared.
        seed: seed of torch's generator while the function runs.
        inputs: gives the inputs of some samples, for lazy modules and those that are cut.

    Raises:
        ConfigError: the module cannot be trained, or ``cuts`` or ``splits`` were given without a
            module.
    """
    given, cuts = objects.model, objects.cuts
    if given is None or isinstance(given, Mapping):
        if cuts:
            raise ConfigError("cuts: layers are cut between one another; leave cuts out")
        if objects.splits:
            raise ConfigError("splits: they name matrices of a torch module; leave splits out")
        return None, given
    import torch

    if not isinstance(given, torch.nn.Module) and callable(given):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            given = _made("model", given)
        if isinstance(given, Mapping):
            return None, given
    if not isinstance(given, torch.nn.Module):
        raise ConfigError(
            f"model: a torch module is needed, or layers by name, or a function that makes one of "
            f"them, not an object of type {type(given).__name__}; the name of a kind is "
            "model={'kind': 'resnet'}"
        )
    if any(map(torch.nn.parameter.is_lazy, given.parameters())):
        _give_shapes(given, inputs(), seed)
    if (own := list(given.parameters())) and not any(p.requires_grad for p in own):
        raise ConfigError(
            "model: all of its parameters are frozen, so that nothing is trained; unfreeze some by "
            "requires_grad_(True)"
        )
    samples = inputs() if cuts else None
    try:
        return given, extras.torch_layers(given, cuts, samples, objects.splits)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"model: {error}") from error


def _made(key: str, maker: Any) -> Any:
    """The object that a class or a function makes; ConfigError: it needs arguments."""
    try:
        signature(maker).bind()
    except TypeError as error:
        name = name_of(maker)
        raise ConfigError(
            f"{key}: {name} needs arguments ({error}); give {key}={name}(...)"
        ) from error
    except ValueError:  # a function in C tells no signature
        pass
    return maker()


def _give_shapes(module: Any, inputs: Array, seed: int) -> None:
    """Give lazy modules shapes from the first sample, and values; ConfigError: it does not fit."""
    import torch

    from mpitrain.adapters.torch.arrays import tensors_of
    from mpitrain.adapters.torch.checks.probe import arguments
    from mpitrain.fields import as_given, fields

    kind = next(one.dtype for one in module.parameters() if torch.nn.parameter.is_lazy(one))
    given = tensors_of(fields(inputs[:1]), kind, every=True)
    form = as_given if isinstance(module, torch.nn.Sequential) else None
    args, options = arguments(given, {}, form)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            modes = [(part, part.training) for part in module.modules()]
            module.eval()(*args, **options)
            for part, mode in modes:
                part.training = mode
    except Exception as error:  # the module's own code may raise anything
        raise ConfigError(
            f"model: it has lazy parts, and the first sample cannot give them their shapes "
            f"({type(error).__name__}: {' '.join(str(error).split())}); run it once before"
        ) from error


def kinds(module: Any) -> dict[str, object]:
    """Types of a torch module's parts, by name; for torch's own classes with their options."""
    return {
        f"model{name and '.'}{name}": f"{type(part).__name__}({part.extra_repr()})"
        if type(part).__module__.startswith("torch.nn.")
        else type(part).__name__
        for name, part in (module.named_modules() if module is not None else ())
    }


def optimizer(
    given: Any, module: Any, layers: Mapping[str, nn.Layer] | None, job: Config
) -> tuple[list[Any], "Grouping", dict[str, object]]:
    """The optimiser that the function ``given`` makes from the parameters of a module.

    Returns the update rules of its groups, the one of each parameter, and the options of all groups
    by name, which must be the same on all ranks.  ConfigError: torch's optimiser cannot be taken.
    """
    own = extras.trained(module, layers or {}) if module is not None else {}
    groups, grouping = extras.grouped(given, own, is_cut=bool(cut_by(job)))
    options: dict[str, object] = {
        f"{key} of the optimizer's group {number}": value
        for number, one in enumerate(groups)
        for key, value in one.options.items()
    }
    options |= {f"the optimizer's group of {name}": grouping(name).number for name in own}
    for name, begun in groups[0].begun.items():
        every = hashlib.sha256()
        for _, values in sorted(begun.slots.items()):
            every.update(values.tobytes())
        digest = every.hexdigest()[:16]
        options[f"the optimizer's state of {name}"] = f"{begun.steps} steps, digest {digest}"
    return groups, grouping, options


def expect_without_momentum(job: Config, given: "Optimizer") -> None:
    """Raise ConfigError if both the codec and the optimiser keep a momentum."""
    codec = job.compress.codec
    if codec == "none" or not extras.DGC.made(extras.parse_codec(codec)) or not given.slots:
        return
    if name_of(given) != "SGD" or getattr(given, "momentum", True):
        raise ConfigError(
            f"compress.codec: {codec} has the momentum, and optimizer= gives {name_of(given)}, "
            f"which keeps {', '.join(given.slots)}; give an SGD without momentum, such as lambda "
            "p: torch.optim.SGD(p, lr=0.1)"
        )


def types(
    module: Any, layers: Mapping[str, Any], job: Config, asked: Mapping[str, Any]
) -> dict[str, str]:
    """Keys of [run] that follow from the types of a torch module's parameters.

    ``dtype`` is the widest of them, float32 at least.  Where all have the same 16 bits, ``compute``
    is their type; where they have several, the layer computes with each parameter in its own.
    Nothing follows where the program says ``dtype`` itself.

    Raises:
        ConfigError: several types in several layers, or on several tensor ranks.
    """
    keys = {**asked.get("run", {}), **asked}
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters()})
    if "dtype" in keys or not kinds:
        return {}
    found = {"dtype": "float64" if "float64" in kinds else "float32"}
    if len(kinds) == 1 and kinds[0] not in found.values() and "compute" not in keys:
        found["compute"] = kinds[0]
    if len(kinds) > 1 and job.run.compute == "same":
        p = job.parallel
        if len(layers) > 1 or max(p.pipe, p.tensor) > 1:
            raise ConfigError(
                f"model: its parameters are of {' and '.join(kinds)}, and with parallel.pipe, "
                "parallel.tensor or cuts all must have one type; leave these out, or give "
                f"dtype={found['dtype']!r}, in which all of it is computed then"
            )
        for layer in layers.values():
            layer.keep_types()
    return found


def own_loss(outputs: Any, labels: Any) -> Any:
    """``loss="model"``: the loss that the model computes itself; ValueError: it computes none."""
    if not isinstance(outputs, Mapping) or "loss" not in outputs:
        raise ValueError(
            "the model gives no loss itself; give it labels, or give loss=function; a loss that "
            "compares the samples of a batch with one another, as CLIP's by return_loss, is "
            "another number in every layout, and is for a loop of your own over torch.distributed"
        )
    return outputs["loss"]


def loss(given: Any, form: Any, layers: Mapping[str, nn.Layer]) -> LossFunction | None:
    """A loss from a function of torch tensors, or a class such as ``torch.nn.MSELoss``.

    ``form`` gives outputs by name the module's form, of these layers; none: it is no module.
    ConfigError: the class needs arguments.
    """
    if given is None or hasattr(given, "expect"):
        return given
    if isinstance(given, type):  # as torch.nn.MSELoss
        given = _made("loss", given)
    return extras.TorchLoss(given, form, extras.Lent(layers))


def over_parts(given: Any) -> Any:
    """A function of outputs and a label of several parts, from one that takes these in turn."""
    if isinstance(given, AllSamples):
        return AllSamples(over_parts(given.function))
    if not callable(given) or isinstance(given, type) or hasattr(given, "expect"):
        return given

    @wraps(given, assigned=())
    def function(outputs: Any, labels: Any) -> Any:
        return given(outputs, *labels)

    function.__name__ = name_of(given)
    return function


def metric(given: Any, name: str, form: Any, *, is_torch: bool) -> Any:
    """A Metric from a function of torch tensors if ``is_torch``, else AllSamples.

    A function of arrays is called with all samples at once; one of tensors is if it says so.
    ConfigError: it is no function, or is named "loss", which tests always measure.
    """
    if not isinstance(name, str) or not (callable(given) or hasattr(given, "value")):
        raise ConfigError(
            "metrics: expected functions by their names, as {'mae': mae}, got "
            f"{{{name!r}: {given!r}}}"
        )
    if name == "loss":
        raise ConfigError(
            "metrics: 'loss' is the name of the mean loss, which tests always measure; choose "
            "another name"
        )
    if hasattr(given, "add"):
        return given
    function = given.function if isinstance(given, AllSamples) else given
    if not is_torch:
        return AllSamples(function)
    if function is not given:
        return AllSamples(extras.Following(function, form).of_arrays)
    return extras.TorchMetric(given, name, form)
