"""Costs of a model's layers, measured here or read from PipeDream's text profiles."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec import Struct

from collectives.files import read_regular, replace
from mpitrain.arrays import as_inputs
from mpitrain.config import Config, ConfigError
from mpitrain.device import HOST, Device
from mpitrain.fields import filled
from mpitrain.group import TensorGroup, cut
from mpitrain.memory import keep_freed
from mpitrain.nn.context import RESTING
from mpitrain.nn.layer import go_forward
from mpitrain.nn.positions import Positions

if TYPE_CHECKING:
    from mpitrain.data.dataset import Dataset
    from mpitrain.models import SequentialModel


class LayerProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """A layer with one micro-batch: seconds, and bytes of its output and of its parameters."""

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


class ProfileError(ValueError):
    """A file is no profile; the message has the line."""


def measure(config: Config, repeats: int = 5, device: Device = HOST) -> list[LayerProfile]:
    """Time the layers of a job's model on one micro-batch, in this process: the best of repeats.

    Raises:
        ConfigError: a layer's parameters do not fit into memory.
    """
    from mpitrain import data, models
    from mpitrain.config import expect

    expect(config, "described", command="mpitrain profile")
    found = data.load(config.data, config.run.dtype, config.loss.ignored)
    return measure_layers(config, models.build(config, found), found, repeats, device)


def measure_layers(
    config: Config,
    model: "SequentialModel",
    found: "Dataset",
    repeats: int = 5,
    device: Device = HOST,
    group: TensorGroup | None = None,
    positions: Positions | None = None,
) -> list[LayerProfile]:
    """Time the layers of a model on the first samples of its data; see :func:`measure`.

    Args:
        config, model, found: the job, its model and its data.
        repeats: times of which the best counts.
        device: where the layers compute.
        group: tensor ranks for which the model was built; the parts of its first rank are timed.
        positions: positions of the samples on this rank; None: it has them all.
    """
    from mpitrain.config import ConfigError
    from mpitrain.parallel.precision import compute_type

    keep_freed()
    dtype = compute_type(config.run.compute, config.run.dtype)
    samples = max(1, config.train.batch_size // config.train.micro_batches)
    x = device.put(as_inputs(found.train[:samples].inputs, dtype, model.choices))
    context = RESTING
    if positions is not None:
        x, context = x[:, positions.own], dataclasses.replace(RESTING, positions=positions)
    profile = []
    for name, layer in model.layers.items():
        try:
            initial = model.drawn(name, config.run.seed, np, config.run.dtype)
        except (MemoryError, ValueError) as error:
            text = f"model: the parameters of {name} do not fit into memory ({error})"
            raise ConfigError(text) from error
        parameters = {}
        for own, value in initial.items():
            axis, blocks = layer.split.get(own), layer.fused.get(own, 1)
            if group is not None and axis is not None:
                value = cut(value, axis, group.share(value.shape[axis] // blocks), blocks)
            parameters[own] = device.put(value.astype(dtype))
        forward, backward = [], []
        for _ in range(repeats):
            start = device.clock()
            y, saved = go_forward(layer, name, parameters, x, context)
            middle = device.clock()
            _, kept = layer.backward(parameters, saved, filled(y, len(y), 1))
            layer.gradients(parameters, kept)
            forward.append(middle - start)
            backward.append(device.clock() - middle)
        size = sum(value.nbytes for value in initial.values())
        profile.append(LayerProfile(name, min(forward), min(backward), y.nbytes, size))
        x = y
    return profile


def write_profile(path: Path, profile: Sequence[LayerProfile]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, msgspec.json.format(msgspec.json.encode(list(profile))).decode())


def read_profile(path: Path) -> list[LayerProfile]:
    """A profile from a file of either format; ``ProfileError``: the file is no profile."""
    try:
        return parse_profile(read_regular(path), str(path))
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}") from error


def parse_profile(data: bytes, name: str) -> list[LayerProfile]:
    """A profile from the bytes of its file: JSON, or lines of PipeDream's.

    Raises:
        ProfileError: they are no profile.
    """
    if data.lstrip()[:1] == b"[":
        try:
            profile = msgspec.json.decode(data, type=list[LayerProfile])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            reason = " ".join(str(error).split())  # the text may quote the file
            raise ProfileError(f"{name}: {reason}") from error
    else:
        try:
            profile = _pipedream(data.decode("utf-8"), name)
        except UnicodeDecodeError as error:
            raise ProfileError(f"{name} is not text at byte {error.start}") from error
    if not profile:
        raise ProfileError(f"{name} has no layers")
    for layer in profile:
        numbers = (layer.forward_s, layer.backward_s, layer.activation_bytes, layer.parameter_bytes)
        if not all(isfinite(number) and number >= 0 for number in numbers):
            raise ProfileError(f"{name}: {layer.name} has a number below 0 or not finite")
    return profile


def table(profile: Sequence[LayerProfile]) -> str:
    lines = [
        f"{'layer':<16} {'forward ms':>10} {'backward ms':>11} {'out bytes':>12} {'weights':>12}"
    ]
    lines += [
        f"{layer.name:<16} {1e3 * layer.forward_s:10.3f} {1e3 * layer.backward_s:11.3f} "
        f"{layer.activation_bytes:12.0f} {layer.parameter_bytes:12.0f}"
        for layer in profile
    ]
    return "\n".join(lines)


_NODE = re.compile(
    r"(\S+) -- (.*) -- forward_compute_time=([\d.eE+-]+), backward_compute_time=([\d.eE+-]+), "
    r"activation_size=(\[.*\]|[\d.eE+-]+), parameter_size=([\d.eE+-]+)\s*"
)
_EDGE = re.compile(r"\t(\S+) -- (\S+)\s*")


def _pipedream(text: str, name: str) -> list[LayerProfile]:
    """Nodes and edges (Narayanan et al. 2019), in milliseconds and bytes; parameters in bytes."""
    nodes: dict[str, LayerProfile] = {}
    after: dict[str, set[str]] = defaultdict(set)
    for number, line in enumerate(text.splitlines(), 1):
        if node := _NODE.fullmatch(line):
            key, what, forward, backward, activation, parameters = node.groups()
            try:
                sizes = [float(s) for s in activation.strip("[]").split(";")]
                nodes[key] = LayerProfile(
                    f"{key} {what}",
                    float(forward) / 1e3,
                    float(backward) / 1e3,
                    sum(sizes),
                    float(parameters),
                )
            except ValueError as error:
                raise ProfileError(f"{name}, line {number}: {error}") from error
        elif edge := _EDGE.fullmatch(line):
            before, key = edge.groups()
            after[key].add(before)
        elif line.strip():
            raise ProfileError(f"{name}, line {number}: neither a layer nor an edge: {line[:60]!r}")
    unknown = ({k for ks in after.values() for k in ks} | set(after)) - set(nodes)
    if unknown:
        raise ProfileError(f"{name}: an edge leads to {sorted(unknown)[0]}, which is no layer")
    try:
        order = list(TopologicalSorter({key: sorted(after[key]) for key in nodes}).static_order())
    except CycleError as error:
        raise ProfileError(f"{name}: the layers follow one another in a circle") from error
    return _chain(nodes, {key: frozenset(after[key]) for key in nodes}, order)


def _chain(
    nodes: dict[str, LayerProfile], after: dict[str, frozenset[str]], order: list[str]
) -> list[LayerProfile]:
    """Parallel branches made one layer, so that every layer is passed by everything."""
    last_use = {key: order.index(key) for key in order}
    for key, sources in after.items():
        for source in sources:
            last_use[source] = max(last_use[source], order.index(key))
    chain: list[LayerProfile] = []
    group: list[str] = []
    reach = 0
    for index, key in enumerate(order):
        group.append(key)
        # Cut here if the output of this layer alone goes on.
        if reach <= index:
            layers = [nodes[k] for k in group]
            name = nodes[key].name if len(layers) == 1 else f"{layers[0].name} ... {key}"
            chain.append(
                LayerProfile(
                    name,
                    sum(layer.forward_s for layer in layers),
                    sum(layer.backward_s for layer in layers),
                    nodes[key].activation_bytes,
                    sum(layer.parameter_bytes for layer in layers),
                )
            )
            group = []
        reach = max(reach, last_use[key])
    return chain


def profiled(config: Config) -> list[LayerProfile]:
    """The profile that ``parallel.profile`` names; ConfigError: it is none."""
    try:
        return read_profile(Path(config.parallel.profile))
    except ProfileError as error:
        raise ConfigError(f"parallel.profile: {error}") from error
