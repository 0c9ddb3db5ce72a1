"""Maps of names that say how tensor ranks share a torch module."""

import re
from collections.abc import Iterator, Mapping
from inspect import getattr_static
from typing import Any, NamedTuple

from torch import nn

COLUMNS, ROWS, NUMBER = "columns", "rows", "number"
_FUSED = f"{COLUMNS} of "
_DECODER = {
    **dict.fromkeys([f"self_attn.{name}_proj" for name in "qkv"], COLUMNS),
    "self_attn.o_proj": ROWS,
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), COLUMNS),
    "mlp.down_proj": ROWS,
}
#: Maps of the models of ``transformers`` that are known, by ``config.model_type``.
KNOWN: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "attn.c_attn": f"{_FUSED}3", "attn.split_size": NUMBER, "attn.c_proj": ROWS,
        "mlp.c_fc": COLUMNS, "mlp.c_proj": ROWS,
    },
    **dict.fromkeys(("llama", "mistral", "qwen2"), _DECODER),
    "bert": {
        **dict.fromkeys([f"attention.self.{n}" for n in ("query", "key", "value")], COLUMNS),
        "attention.output.dense": ROWS, "intermediate.dense": COLUMNS, "output.dense": ROWS,
    },
    "vit": {
        **dict.fromkeys([f"attention.{name}_proj" for name in "qkv"], COLUMNS),
        "attention.o_proj": ROWS, "mlp.fc1": COLUMNS, "mlp.fc2": ROWS,
    },
}  # fmt: skip


class Split(NamedTuple):
    """How tensor ranks share something of a module.

    Attributes:
        kind: ``columns`` or ``rows`` of a matrix, or ``number``: a whole number, the attribute of a
            module, that counts what is shared.
        blocks: number of matrices that lie side by side in one, each of which is cut.
    """

    kind: str
    blocks: int = 1


class Plan(NamedTuple):
    """How tensor ranks share a module.

    Attributes:
        splits: by full names of modules and attributes; empty: nobody knows.
        heads: numbers of attention heads that the ranks must divide, by name.
    """

    splits: Mapping[str, Split] = {}
    heads: Mapping[str, int] = {}

    @property
    def is_of_parts(self) -> bool:
        """Whether each part of the module that has shared columns has shared rows."""
        kinds: dict[str, set[str]] = {}
        for name, split in self.splits.items():
            kinds.setdefault(name.partition(".")[0], set()).add(split.kind)
        return all((COLUMNS in one) == (ROWS in one) for one in kinds.values())

    def within(self, prefix: str) -> "Plan":
        """The plan of the part of the module that has this prefix."""
        inside = {n: one for n, one in self.splits.items() if n.startswith(prefix)}
        return Plan({n.removeprefix(prefix): one for n, one in inside.items()}, self.heads)


def plan(module: nn.Module, splits: Mapping[str, str]) -> Plan:
    """How tensor ranks share a module.

    Args:
        module: the whole module.
        splits: ``columns``, ``columns of 3`` (or another number), ``rows`` or ``number`` by names
            of modules and attributes, or by the ends of names where none has that whole name; a
            longer end counts before a shorter one; empty: as :data:`KNOWN` says.

    Raises:
        ValueError: a name or a value is none of these.
    """
    config: Any = getattr(module, "config", None)
    known = splits or KNOWN.get(getattr(config, "model_type", ""), {})
    modules = dict(module.named_modules(remove_duplicate=False))
    found: dict[str, Split] = {}
    read = {name: _read(name, text) for name, text in known.items()}
    for name in sorted(read, key=lambda one: (one in modules, one.count("."))):
        split = read[name]
        of = _numbers if split.kind == NUMBER else _matrices
        places = list(of(modules, name, split.kind))
        if splits and not places:
            what = "whole number" if split.kind == NUMBER else "module"
            has = "" if split.kind == NUMBER else " with a weight of its own"
            raise ValueError(
                f"splits: there is no {what} {name!r}{has} in a {type(module).__name__}; give a "
                "name that print(model) shows, or its end, or that of an attribute of such a module"
            )
        found |= dict.fromkeys(places, split)
    heads = {} if splits or not found else _heads(config)
    return Plan(found, heads)


def _read(name: Any, text: Any) -> Split:
    if isinstance(name, str) and isinstance(text, str):
        if text in (COLUMNS, ROWS, NUMBER):
            return Split(text)
        if fused := re.fullmatch(f"{_FUSED}([1-9][0-9]{{,8}})", text):
            return Split(COLUMNS, int(fused[1]))
    raise ValueError(
        f"splits: {name!r} is {text!r}; write 'columns', 'columns of 3' where three matrices lie "
        "side by side, 'rows', or 'number' for an attribute that counts what is shared"
    )


def _ending(modules: Mapping[str, nn.Module], name: str) -> list[str]:
    """The full name of a module, or those of which it is the end."""
    ends = (full for full in modules if full.endswith(f".{name}"))
    return [name] if name in modules else list(ends)


def _numbers(modules: Mapping[str, nn.Module], name: str, kind: str) -> Iterator[str]:
    owner, _, attribute = name.rpartition(".")
    for full in _ending(modules, owner) if owner else modules:
        if type(getattr_static(modules[full], attribute, None)) is int:  # calls no property
            yield f"{full}.{attribute}".lstrip(".")


def _matrices(modules: Mapping[str, nn.Module], name: str, kind: str) -> Iterator[str]:
    """Matrices of a name; of one that peft has put another one around, it and what it shares."""
    for full in _ending(modules, name):
        if "base_layer" not in modules[full]._modules:
            if modules[full]._parameters.get("weight") is not None:
                yield full
            continue
        yield f"{full}.base_layer"
        inner = f"{full}.lora_{'B' if kind == COLUMNS else 'A'}."
        yield from (other for other in modules if other.startswith(inner))


def _heads(config: Any) -> dict[str, int]:
    named = ("num_attention_heads", "num_key_value_heads")
    found = {name: getattr(config, name, None) for name in named}
    return {name: count for name, count in found.items() if isinstance(count, int)}
