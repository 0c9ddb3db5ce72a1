"""Imports the user's own Python that a job file names, as ``waves.py:model``."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from collectives.analysis import executed
from collectives.errors import words
from mpitrain.config import ConfigError, Own


def brought(own: Own) -> dict[str, Any]:
    """The keywords of :class:`mpitrain.Trainer` that an [own] table stands for.

    Raises:
        ConfigError: something cannot be imported, or is not what it should be.
    """
    modules: dict[str, ModuleType] = {}
    found: dict[str, Any] = {}
    for key, text in msgspec.structs.asdict(own).items():
        if text and isinstance(text, str) and key != "cuts":
            is_models = (key, text) == ("loss", "model")
            found[key] = text if is_models else _named(key, text, modules)
    if "data" in found:
        found["train_data"], found["test_data"] = _pair(own.data, found.pop("data"))
    metrics = found.get("metrics")
    if metrics is not None and not isinstance(metrics, Mapping):
        found["metrics"] = {own.metrics.rpartition(":")[2]: metrics}
    names = {key: getattr(own, key) for key in ("cuts", "splits")}
    return found | names | {"classes": own.classes}


def _named(key: str, text: str, modules: dict[str, ModuleType]) -> Any:
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ConfigError(f"own.{key} = {text!r}: write module:name or file.py:name")
    try:
        if place.endswith(".npz"):
            return np.load(place)[name]
        module = modules.get(place) or modules.setdefault(place, _imported(place))
    except Exception as error:
        raise ConfigError(f"own.{key} = {text!r} cannot be imported: {words(error)}") from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise ConfigError(f"own.{key} = {text!r}: {place} has no {name!r}") from error


def _imported(place: str) -> ModuleType:
    """A module by name, or of a file, whose folder is searched for what it imports itself."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve(strict=True)
    return executed(path, f"_own_{path.stem}")


def _pair(text: str, function: Any) -> tuple[Any, Any]:
    try:
        train, test = function()
    except Exception as error:
        raise ConfigError(
            f"own.data = {text!r} must give (data to train on, data to test on): {words(error)}"
        ) from error
    if train is None:
        raise ConfigError(f"own.data = {text!r} gives no data to train on")
    return train, test
