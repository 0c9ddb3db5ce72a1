"""A layout as an SVG picture: ranks on nodes, groups and their links, memory, the step."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from collectives.files import replace
from mpitrain.metrics.words import counted, digits, in_words
from mpitrain.parallel.grid import Coordinates
from mpitrain.search.layouts import Found, Search

_STYLE = """
svg { --ink: #1f2328; --faint: #59636e; --edge: #b6bfc9; --paper: #ffffff; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6edf3; --faint: #9198a1; --edge: #4a525b; --paper: #0d1117; } }
text { fill: var(--ink); } .faint { fill: var(--faint); } .cell { fill: #10202e; font-size: 10px; }
.head { font-weight: 600; } .paper { fill: var(--paper); } .box { fill: none; stroke: var(--edge); }
.limit { stroke: #d1242f; stroke-width: 2; }
"""
_WIDTH, _HALF, _MARGIN, _CELL = 1000, 500, 20, 24
#: Nodes and stages that are drawn; the first ones and the last one stand for more.
_MOST = 16
#: Groups of a rank by what it sends: the ranks, what they do, and a colour.
_GROUPS = {
    "tensor": ("tensor ranks", "sum activations", "#8250df"),
    "context": ("context ranks", "exchange keys and values, or rows of images", "#bc4c00"),
    "experts": ("expert ranks", "exchange rows", "#0969da"),
    "gradients": ("ranks", "sum gradients", "#1a7f37"),
    "pipe": ("stages", "hand activations on", "#cf222e"),
}


def draw(search: Search, found: Found, path: Path) -> None:
    """Draw a layout into an SVG file, which follows the reader's light or dark mode."""
    replace(path, _Drawing(search, found).svg())


class _Drawing:
    def __init__(self, search: Search, found: Found) -> None:
        self._search, self._found = search, found
        self._grid = found.layout.grid
        self._parts: list[str] = []

    def svg(self) -> str:
        found, own = self._found, self._found.layout
        rate = self._search.batch / found.seconds
        self._text(_MARGIN, 30, str(found.layout), "head", 16)
        schedule = f"{own.schedule}; " if own.pipe > 1 else ""
        self._text(
            _MARGIN, 52, f"{schedule}{in_seconds(found.seconds)} a step, {digits(rate)} samples/s "
            f"on {counted(self._grid.ranks, 'rank')}", "faint",
        )  # fmt: skip
        below = self._nodes(86)
        bottom = max(self._stages(below + 30), self._groups(self._step(below + 30) + 34)) + 12
        title = f"<title>{escape(str(found))}</title>"
        paper = f'<rect class="paper" width="{_WIDTH}" height="{bottom}"/>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom}" '
            f'font-size="13" font-family="sans-serif" role="img">{title}'
            f"<style>{_STYLE}</style>{paper}{''.join(self._parts)}</svg>\n"
        )

    def _nodes(self, top: float) -> float:
        """The ranks on their nodes, in their stage's colour; returns where the picture goes on."""
        own, machine = self._found.layout, self._search.machine
        self._text(_MARGIN, top, "Ranks on nodes", "head")
        if self._shared():
            self._text(_MARGIN + 120, top, "dots: the groups of rank 0, coloured as below", "faint")
        nodes = machine.ranks // machine.per_node
        across = min(machine.per_node, 8 if nodes > 1 else 32)
        # Tensor ranks touch each other, and other neighbours do not.
        wide = across * _CELL + (across - 1) // own.tensor * 3 + 12
        columns = max(1, (_WIDTH - 2 * _MARGIN + 10) // (wide + 10))
        high = -(-machine.per_node // across) * 28 + 8
        shown = _some(range(nodes))
        for place, node in enumerate(shown):
            x = _MARGIN + place % columns * (wide + 10)
            y = top + 14 + place // columns * (high + 26)
            left = f", after {node - shown[-2] - 1} more" if place and node - shown[-2] > 1 else ""
            self._text(x, y + 12, f"node {node}{left}", "faint")
            self._parts.append(_rect(x, y + 16, wide, high, 'class="box" rx="4"'))
            for at in range(machine.per_node):
                row, column = divmod(at, across)
                across_x = x + 6 + column * _CELL + column // own.tensor * 3
                self._rank(node * machine.per_node + at, across_x, y + 21 + row * 28)
        return top + 14 + -(-len(shown) // columns) * (high + 26)

    def _rank(self, rank: int, x: float, y: float) -> None:
        stage = self._grid.place(rank).stage
        fill = f'fill="{self._colour(stage)}" stroke="var(--paper)"'
        self._parts.append(_rect(x, y, _CELL, 26, fill))
        middle = f'x="{x + _CELL / 2}" y="{y + 12}" text-anchor="middle"'
        self._parts.append(f'<text class="cell" {middle}>{rank}</text>')
        marks = [key for key, members in self._shared().items() if rank in members]
        for number, key in enumerate(marks):
            across = x + _CELL / 2 + (number - (len(marks) - 1) / 2) * 6
            self._parts.append(
                f'<circle cx="{across}" cy="{y + 20}" r="2.4" fill="{_GROUPS[key][2]}"/>'
            )

    def _shared(self) -> dict[str, set[int]]:
        """The members of each group of rank 0 that has more ranks."""
        own, grid = self._found.layout, self._grid
        replicas, contexts = range(grid.replicas[0]), range(own.context)
        summing = [grid.rank(Coordinates(0, r, 0, c)) for r in replicas for c in contexts]
        found = {
            "tensor": set(range(own.tensor)),
            "context": {grid.rank(Coordinates(0, 0, 0, context)) for context in contexts},
            "experts": set(summing[: own.sharing]),
            "gradients": set(summing),
            "pipe": {grid.rank(Coordinates(stage, 0, 0)) for stage in range(own.pipe)},
        }
        return {key: ranks for key, ranks in found.items() if len(ranks) > 1}

    def _stages(self, top: float) -> float:
        """The layers of each stage, and its memory against the limit."""
        search, found = self._search, self._found
        limit = search.machine.memory
        most = max([found.memory, *([limit] if limit < float("inf") else [])])
        wide = _HALF - _MARGIN - 90
        several = len(found.step.memory) > 1
        self._text(_MARGIN, top, "Stages and memory of a rank" if several else "Memory", "head")
        self._key(_MARGIN + 210, top, "#8c959f", "state")
        self._key(_MARGIN + 275, top, "#c8cfd6", "activations")
        ends, y = (0.0, 0.0), top + 24.0
        shown = _some(range(len(found.step.memory)))
        stages = list(self._memory())
        for number, stage in enumerate(shown):
            names, state = stages[stage]
            first = self._grid.rank(Coordinates(stage, 0, 0))
            count = self._grid.replicas[stage] * self._found.layout.context
            last = first + count * self._found.layout.tensor - 1
            ranks = f"ranks {first} to {last}" if last > first else f"rank {first}"
            self._parts.append(_rect(_MARGIN, y - 10, 12, 12, f'fill="{self._colour(stage)}"'))
            self._text(_MARGIN + 18, y, f"{stage}: {ranks}: {names}", size=12)
            used = found.step.memory[stage]
            for width, fill in (
                (used, "#c8cfd6"),
                (state, "#8c959f"),
            ):
                bar = f'fill="{fill}"'
                self._parts.append(_rect(_MARGIN + 18, y + 5, wide * width / most, 9, bar))
            self._text(_MARGIN + 24 + wide, y + 14, f"{digits(used / 2**30)} GiB", size=12)
            ends = (ends[0] or y + 2, y + 17)
            y += 36
            if number + 1 < len(shown) and shown[number + 1] > stage + 1:
                self._text(_MARGIN + 18, y - 4, f"{shown[-1] - stage - 1} more", "faint", 12)
                y += 18
        if limit < float("inf"):
            x = _MARGIN + 18 + wide * limit / most
            self._parts.append(f'<path class="limit" d="M{x:.1f} {ends[0]} V{ends[1]}"/>')
            self._text(
                _MARGIN + 18, y - 4, f"red: the limit of {digits(limit / 2**30)} GiB", "faint", 12
            )
            y += 18
        return y

    def _memory(self) -> Iterator[tuple[str, float]]:
        """The layers of each stage in words, and the bytes of its state."""
        search, found = self._search, self._found
        for costs, spans in zip(*search.stages(found.layout, found.sizes), strict=True):
            chunks = [_ends([layer.name for layer in search.layers[a:b]]) for a, b in spans]
            yield " | ".join(chunks), float(costs.state(costs.sums.of(spans)))

    def _step(self, top: float) -> float:
        """The step as a bar, by what ranks do in it on average."""
        step = self._found.step
        working = step.computing * (1 - step.bubble)
        useful = min(step.busy * step.seconds, working)
        small = "computing again, " * self._found.layout.recompute + "small passes"
        parts = {
            "the model's work": (useful, "#0072b2"),
            small: (working - useful, "#74b3d8"),
            "idle in the bubble": (step.computing * step.bubble, "#d8dee4"),
            "communication that is not hidden": (step.seconds - step.computing, "#d55e00"),
        }
        self._text(_HALF + _MARGIN, top, "The step, mean over the ranks", "head")
        x, wide, y = _HALF + _MARGIN + 0.0, _WIDTH - _HALF - 2 * _MARGIN, top + 12
        for seconds, colour in parts.values():
            width = wide * max(0.0, seconds) / step.seconds
            self._parts.append(_rect(x, y, width, 22, f'fill="{colour}"'))
            x += width
        y += 42
        for name, (seconds, colour) in parts.items():
            if seconds > 0.0005 * step.seconds:
                share = f"{name}: {in_seconds(seconds)}, {seconds / step.seconds:.1%}"
                self._key(_HALF + _MARGIN, y, colour, share)
                y += 20
        return y

    def _groups(self, top: float) -> float:
        """The groups, the link that each goes over, and what a rank sends."""
        own, machine = self._found.layout, self._search.machine
        strides = {"context": own.tensor, "experts": own.tensor, "gradients": own.tensor}
        strides |= {"tensor": 1, "pipe": own.summing * own.tensor}
        self._text(_HALF + _MARGIN, top, "Groups, and what a rank sends in a step", "head")
        y = top + 24
        for key, members in self._shared().items():
            name, what, colour = _GROUPS[key]
            stride = strides[key]
            size = machine.ranks // stride if key == "pipe" else len(members)
            link = machine.link(size, stride)
            where = "within a node" if size * stride <= machine.per_node else "between nodes"
            sent = in_words(self._found.step.sent[key])
            self._key(_HALF + _MARGIN, y, colour, f"{len(members)} {name} {what}: {sent}")
            speed = f", {digits(1e-9 / link.beta)} GB/s a rank" if link.beta else ""
            apart = f"{stride} apart" if stride > 1 else "side by side"
            self._text(_HALF + _MARGIN + 18, y + 16, f"{apart}, {where}{speed}", "faint", 12)
            y += 40
        if not self._shared():
            self._text(_HALF + _MARGIN, y, "none: one rank", "faint")
        return y

    def _key(self, x: float, y: float, colour: str, text: str) -> None:
        self._parts.append(_rect(x, y - 10, 12, 12, f'fill="{colour}"'))
        self._text(x + 18, y, text)

    def _text(self, x: float, y: float, text: str, kind: str = "", size: int = 13) -> None:
        self._parts.append(
            f'<text class="{kind}" x="{x}" y="{y}" font-size="{size}">{escape(text)}</text>'
        )

    def _colour(self, stage: int) -> str:
        """A colour on which dark numbers can be read; neighbours differ."""
        hue = 205 + 290 * stage / max(1, self._found.layout.pipe)
        return f"hsl({hue % 360:.0f} 60% {74 if stage % 2 else 64}%)"


def _some(numbers: Sequence[int]) -> list[int]:
    return [*numbers[: _MOST - 1], numbers[-1]] if len(numbers) > _MOST else list(numbers)


def _ends(names: Sequence[str]) -> str:
    """The first and the last name."""
    return ", ".join(names) if len(names) < 3 else f"{names[0]} … {names[-1]}"


def in_seconds(seconds: float) -> str:
    """A time in words, as ``12.3 ms``."""
    return f"{digits(seconds)} s" if seconds >= 1 else f"{digits(1e3 * seconds)} ms"


def _rect(x: float, y: float, width: float, height: float, look: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height}" {look}/>'
