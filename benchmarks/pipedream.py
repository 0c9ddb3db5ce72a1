"""PipeDream's Table 1 and figure 10 beside what the partitioner and the virtual cluster say.

    python -m benchmarks.pipedream                      # the table, in Markdown
    python -m benchmarks.pipedream --plot curve.png     # accuracy against time, a small network

The layers come from their shapes alone.  A row has the partitioner's answer twice: on the cluster's
nominal links, and on links that are as fast as the paper's own BSP speed-up implies.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple

from collectives.analysis.pictures import expect_picture
from collectives.commands.arguments import positive
from collectives.errors import CollectiveError
from mpitrain import data, models
from mpitrain.config import load
from mpitrain.metrics.reader import read_records
from mpitrain.metrics.records import Epoch, Step
from mpitrain.pipeline.draw import figure
from mpitrain.pipeline.partition import Costs, StagePlans, partition
from mpitrain.pipeline.profiles import LayerProfile, write_profile
from mpitrain.search.layers import layer_costs


class Layer(NamedTuple):
    """A layer with one sample: multiplications forward, numbers of its output and parameters."""

    name: str
    multiplications: float
    outputs: float
    parameters: float


def vgg16() -> list[Layer]:
    """Simonyan & Zisserman 2015, configuration D, on 224 x 224; pooling ends a block."""
    found, side, before = [], 224, 3
    for block, (channels, count) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]):
        for index in range(count):
            work, side = 9 * before * channels * side**2, side // (1 + (index == count - 1))
            parameters = 9 * before * channels + channels
            found.append(Layer(f"conv{block}.{index}", work, channels * side**2, parameters))
            before = channels
    for index, (inputs, outputs) in enumerate(pairwise([512 * 7 * 7, 4096, 4096, 1000])):
        found.append(Layer(f"fc{index}", inputs * outputs, outputs, inputs * outputs + outputs))
    return found


#: A convolution: side of the output, channels before and after, numbers of the kernel.
Convolution = tuple[int, int, int, int]


def inception_v3() -> list[Layer]:
    """Szegedy et al. 2016, on 299 x 299, without the auxiliary head; branches are one layer."""
    blocks: list[tuple[str, int, int, list[Convolution]]] = [
        ("1a", 149, 32, [(149, 3, 32, 9)]),
        ("2a", 147, 32, [(147, 32, 32, 9)]),
        ("2b", 73, 64, [(147, 32, 64, 9)]),
        ("3b", 73, 80, [(73, 64, 80, 1)]),
        ("4a", 35, 192, [(71, 80, 192, 9)]),
    ]
    for name, before, pool in (("5b", 192, 32), ("5c", 256, 64), ("5d", 288, 64)):
        sizes = [(before, 64, 1), (before, 48, 1), (48, 64, 25), (before, 64, 1), (64, 96, 9)]
        sizes += [(96, 96, 9), (before, pool, 1)]
        blocks.append((name, 35, 224 + pool, [(35, *size) for size in sizes]))
    reduced = [(17, 288, 384, 9), (35, 288, 64, 1), (35, 64, 96, 9), (17, 96, 96, 9)]
    blocks.append(("6a", 17, 768, reduced))
    for name, c in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        sizes = [(768, 192, 1), (768, c, 1), (c, c, 7), (c, 192, 7), (768, c, 1), (c, c, 7)]
        sizes += [(c, c, 7), (c, c, 7), (c, 192, 7), (768, 192, 1)]
        blocks.append((name, 17, 768, [(17, *size) for size in sizes]))
    reduced = [(17, 768, 192, 1), (8, 192, 320, 9), (17, 768, 192, 1), (17, 192, 192, 7)]
    blocks.append(("7a", 8, 1280, [*reduced, (17, 192, 192, 7), (8, 192, 192, 9)]))
    for name, before in (("7b", 1280), ("7c", 2048)):
        sizes = [(before, 320, 1), (before, 384, 1), (384, 384, 3), (384, 384, 3), (before, 448, 1)]
        sizes += [(448, 384, 9), (384, 384, 3), (384, 384, 3), (before, 192, 1)]
        blocks.append((name, 8, 2048, [(8, *size) for size in sizes]))
    found = [
        Layer(
            name,
            sum(own**2 * prod(size) for own, *size in convolutions),
            side**2 * channels,
            sum(prod(size) + 2 * size[1] for _, *size in convolutions),  # and batch norm
        )
        for name, side, channels, convolutions in blocks
    ]
    return [*found, Layer("fc", 2048 * 1000, 1000, 2048 * 1000 + 1000)]


def s2vt(steps: int = 80, words: int = 46_168) -> list[Layer]:
    """Venugopalan et al. 2015: frames of 4096 to 500, two LSTMs of 1000, words of 500.

    The published ``s2vt_vgg_rgb.caffemodel`` has 349,436,137 bytes, which gives the number of
    words; the paper on PipeDream says 349 MB, too.
    """

    def lstm(inputs: int) -> int:
        return 4 * 1000 * (inputs + 1000)

    return [
        Layer("frames", steps * 4096 * 500, steps * 500, 4096 * 500 + 500),
        Layer("lstm1", steps * lstm(500), steps * 1000, lstm(500) + 4000),
        Layer("lstm2", steps * lstm(1500), steps * 1000, lstm(1500) + 4000 + 500 * words),
        Layer("words", steps * 1000 * words, steps * words, 1000 * words + words),
    ]


class Row(NamedTuple):
    """A row of the paper's table: speed-ups over one machine, share of the bytes that is saved."""

    model: str
    machines: int
    cluster: str
    bsp: float
    config: str
    pipedream: float
    saved: float


#: Harlap et al. 2018 (arXiv:1806.03377), Table 1.
PUBLISHED = [
    Row("VGG16", 4, "A", 1.47, "2-1-1", 3.14, 0.90),
    Row("VGG16", 8, "A", 2.35, "7-1", 7.04, 0.95),
    Row("VGG16", 16, "A", 3.28, "9-5-1-1", 9.86, 0.91),
    Row("VGG16", 8, "B", 1.36, "7-1", 6.98, 0.95),
    Row("Inception-v3", 8, "A", 7.66, "8", 7.66, 0.0),
    Row("Inception-v3", 8, "B", 4.74, "7-1", 6.88, 0.47),
    Row("S2VT", 4, "A", 1.10, "2-1-1", 3.34, 0.95),
]
#: Layers, and samples of a machine's minibatch in the paper.
MODELS = {"VGG16": (vgg16, 32), "Inception-v3": (inception_v3, 32), "S2VT": (s2vt, 80)}
#: B/s of a link: 25 and 10 Gb/s Ethernet; one GPU a machine.
LINKS = {"A": 25e9 / 8, "B": 10e9 / 8}
#: Operations a second.  A, Titan X: VGG-16 takes 16 images in 262.42 ms (jcjohnson/cnn-benchmarks,
#: cuDNN 5.0).  B, V100: VGG-16 takes 128 in 673 ms, Inception-v3 in 689 ms (the profiles in
#: github.com/msr-fiddle/pipedream).  Others by the cards' ratio for VGG-16.
RATES = {"A": 16 * 6 * 15.47e9 / 0.26242, "B": 128 * 6 * 15.47e9 / 0.673}
INCEPTION = 128 * 6 * 5.71e9 / 0.689 / RATES["B"]


def profile(layers: Sequence[Layer], samples: int, rate: float) -> list[LayerProfile]:
    """Costs of a minibatch: a multiplication is two operations, backward twice the forward pass."""
    found = []
    for layer in layers:
        seconds = 2 * layer.multiplications * samples / rate
        outputs, parameters = 4 * layer.outputs * samples, 4 * layer.parameters
        found.append(LayerProfile(layer.name, seconds, 2 * seconds, outputs, parameters))
    return found


def of_row(row: Row) -> list[LayerProfile]:
    """The profile of a row's model on a machine of its cluster."""
    layers, samples = MODELS[row.model]
    rate = RATES[row.cluster] * (INCEPTION if row.model == "Inception-v3" else 1.0)
    return profile(layers(), samples, rate)


def implied(row: Row) -> float:
    """B/s of links on which the all-reduce takes as long as the paper's BSP step."""
    costs = Costs(of_row(row), 1.0)
    step = row.machines * costs.total / row.bsp
    return costs.synchronised(0, len(costs.profile), row.machines) / row.machines / step


def cell(row: Row, costs: Costs, found: StagePlans) -> str:
    """Configuration, speed-ups over one machine and over BSP, share of the bytes saved."""
    bsp = partition(costs, [row.machines])
    saved = 1 - costs.sent(found.stages) / costs.sent(bsp.stages)
    speedup, over = costs.total / found.seconds, bsp.seconds / found.seconds
    return f"{found.configuration}, {speedup:.2f}x, {over:.2f}x, {saved:.0%}"


def table() -> str:
    """The table, in Markdown; each cell is what :func:`cell` says."""
    lines = [
        "| model, machines | paper: BSP | PipeDream | exposed: BSP | ours | hidden: GB/s | ours "
        "| the paper's stages |",
        "| --- | ---: | --- | ---: | --- | ---: | --- | --- |",
    ]
    for row in PUBLISHED:
        exposed = Costs(of_row(row), LINKS[row.cluster], hidden=False)
        hidden = Costs(of_row(row), implied(row))
        cells = [
            f"{row.model}, {row.machines} ({row.cluster})",
            f"{row.bsp:.2f}x",
            f"{row.config}, {row.pipedream:.2f}x, {row.pipedream / row.bsp:.2f}x, {row.saved:.0%}",
        ]
        bsp = exposed.total / partition(exposed, [row.machines]).seconds
        cells += [f"{bsp:.2f}x", cell(row, exposed, partition(exposed, row.machines))]
        cells += [f"{implied(row) / 1e9:.2f}", cell(row, hidden, partition(hidden, row.machines))]
        widths = [int(width) for width in row.config.split("-")]
        cells.append(cell(row, hidden, partition(hidden, widths)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


#: A VGG for digits: two blocks of convolutions, then nearly all of the parameters.
JOB = """
[run]
seed = 1
[data]
name = "digits"
[model]
kind = "vgg"
channels = [16, 32]
hidden = [256, 128]
[optim]
name = "sgd"
lr = 0.05
momentum = 0.5
[train]
epochs = {epochs}
batch_size = {batch}
[parallel]
algorithm = "ring"
{parallel}
"""
#: Layouts of 8 ranks with 8 samples a minibatch, and the samples of a step.
LAYOUTS = {
    "BSP, 8": (64, "data = 8"),
    "PipeDream, 7-1": (
        56, 'schedule = "asynchronous"\nwindow = 64\nreplicas = [7, 1]\npartition = [2, 3]'
    ),
}  # fmt: skip


def curve(folder: Path, batch: int, parallel: str, epochs: int) -> list[tuple[float, float]]:
    """Milliseconds of the virtual cluster, and the test accuracy then, after each epoch.

    A pass takes 2 microseconds a million operations; links are such that BSP's 8 ranks are 2.35
    times as fast as one, as in the paper's row of VGG-16.
    """
    job = folder / "job.toml"
    job.write_text(JOB.format(epochs=epochs, batch=batch, parallel=parallel), encoding="utf-8")
    config = load(job)
    found = data.load(config.data, config.run.dtype)
    layers = layer_costs(models.build(config, found), found.input_shape)
    plain = [Layer(one.name, one.forward / 2, one.outputs, one.parameters) for one in layers]
    costs = profile(plain, batch, 5e11)
    write_profile(folder / "costs.json", costs)
    bsp = Costs(profile(plain, 64, 5e11), 1.0, hidden=False)
    reduce = (8 / 2.35 - 1) * bsp.total / 8
    bandwidth = bsp.synchronised(0, len(plain), 8) / 8 / reduce
    words = [sys.executable, "-m", "mpitrain", "train", str(job), "--set", f"run.dir={folder}"]
    words += ["--virtual", "8", "--costs", str(folder / "costs.json"), "--alpha", "0"]
    words.append("--async-progress")  # PipeDream's messages have threads of their own
    subprocess.run([*words, "--bandwidth", f"{bandwidth / 1e9}"], check=True, stdout=sys.stderr)
    points, now = [], 0.0
    for record in read_records(folder / "metrics.jsonl").records:
        if isinstance(record, Step):
            now += 1e3 * record.seconds
        elif isinstance(record, Epoch):
            points.append((now, record.metrics["accuracy"]))
    return points


def draw(path: str, epochs: int) -> None:
    """Draws accuracy against time, and prints when each layout comes to 95%."""
    drawn = figure(figsize=(6, 3.5))
    axes = drawn.subplots()
    for name, (batch, parallel) in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            points = curve(Path(folder), batch, parallel, epochs)
        axes.plot(*zip(*points, strict=True), marker=".", label=name)
        soon = next((f"after {at:.1f} ms" for at, share in points if share >= 0.95), "never")
        print(f"{name}: {points[-1][1]:.1%} after {points[-1][0]:.1f} ms; 95% {soon}")
    axes.set(xlabel="time of the virtual cluster, ms", ylabel="test accuracy")
    axes.legend()
    axes.grid(alpha=0.3)
    drawn.savefig(path, dpi=110)


def main() -> None:
    """Prints the table, or draws the curves."""
    parser = argparse.ArgumentParser(prog="benchmarks.pipedream", description=__doc__)
    text = "file of a drawing of accuracy against time, PNG or SVG"
    parser.add_argument("--plot", default="", help=text)
    parser.add_argument("--epochs", type=positive, default=12, help="epochs of the curves (12)")
    options = parser.parse_args()
    if options.plot:
        try:
            expect_picture(Path(options.plot))
        except CollectiveError as error:
            parser.error(str(error))
        draw(options.plot, options.epochs)
    else:
        print(table())


if __name__ == "__main__":
    main()
