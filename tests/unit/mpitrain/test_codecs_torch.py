"""PowerSGD against torch's own hook, on two processes."""

import subprocess
import sys

import numpy as np
import pytest
from codec_cases import linear_sum

from mpitrain.compress import parse
from mpitrain.compress.powersgd import orthonormal

SHAPES = {"w": (24, 40), "v": (24, 40), "conv": (16, 8, 3, 3), "b": (24,), "small": (4, 4)}
STEPS, START, RANK, SEED = 8, 2, 2, 7

#: Each step's mean of gradients, as the hook leaves it; and the Q that it started from.
PROGRAM = f"""
import os, sys
import numpy as np, torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + folder + "/meet", rank=rank, world_size=2)
shapes = {list(SHAPES.values())!r}
state = hook.PowerSGDState(None, matrix_approximation_rank={RANK}, start_powerSGD_iter={START},
                           min_compression_rate=2, use_error_feedback=True, warm_start=True,
                           random_seed={SEED}, compression_stats_logging_frequency=10**9)
class Bucket:
    def __init__(self, flat):
        self.flat = torch.from_numpy(flat.copy())
    def index(self): return 0
    def is_last(self): return True
    def buffer(self): return self.flat
    def gradients(self):
        parts = self.flat.split([int(np.prod(shape)) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes)]
given = np.load(folder + "/gradients.npy")
means = []
for step in range({STEPS}):
    result = hook.powerSGD_hook(state, Bucket(given[rank, step])).wait()
    means.append(result.numpy().copy())
np.save(folder + f"/means{{rank}}.npy", means)
if rank == 0:
    torch.manual_seed(np.random.RandomState({SEED}).randint(1_000_000_000))
    compressed = [shape for shape in shapes if len(shape) > 1 and np.prod(shape) > 16]
    qs, seen = {{}}, sorted(set(compressed), key=compressed.index)
    for shape in seen:  # by shape, several of one together
        many, columns = compressed.count(shape), int(np.prod(shape[1:]))
        qs[str(shape)] = torch.randn(many, columns, {RANK}).numpy()
    np.savez(folder + "/qs.npz", **qs)
dist.barrier()
os._exit(0)  # torch's threads, told to end one after the other, abort now and then
"""


@pytest.mark.slow
def test_powersgd_is_that_of_torch(tmp_path):
    pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    n = sum(int(np.prod(shape)) for shape in SHAPES.values())
    gradients = rng.normal(size=(2, STEPS, n)).astype(np.float32)
    np.save(tmp_path / "gradients.npy", gradients)
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), str(tmp_path)])
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=180) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    expected = np.load(tmp_path / "means0.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "means1.npy"), expected)

    flats, left = np.zeros((2, 2, n), np.float32)
    tensors = [views(flat) for flat in flats]
    code = parse(f"powersgd:rank={RANK}")
    sketches = [code.sketch(own, 0) for own in tensors]
    drawn = np.load(tmp_path / "qs.npz")
    for sketch in sketches:
        seen: dict[str, int] = {}
        assert sketch.state.keys() == {"w.q", "v.q", "conv.q"}
        for name, q in sketch.state.items():
            shape = str(SHAPES[name.removesuffix(".q")])
            q[...] = orthonormal(drawn[shape][seen.get(shape, 0)].astype(np.float64))
            seen[shape] = seen.get(shape, 0) + 1
    for step in range(START, STEPS):
        for r, flat in enumerate(flats):
            left[r] += gradients[r, step]
            flat[...] = left[r]
        sent = linear_sum(sketches, step, tensors)
        np.testing.assert_allclose(flats[0] / 2, expected[step], atol=1e-5)
        for r, own in enumerate(sent):
            left[r] -= np.concatenate([tensor.reshape(-1) for tensor in own.values()])


def views(flat):
    """The tensors that lie in a vector one after the other."""
    parts = np.split(flat, np.cumsum([np.prod(shape) for shape in SHAPES.values()])[:-1])
    return {name: part.reshape(SHAPES[name]) for name, part in zip(SHAPES, parts, strict=True)}
