"""Which device computes: the job's words, what machines have, and what a device does."""

import logging

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from mpitrain.config import Config, ConfigError, Parallel, Run, load, needs_host
from mpitrain.data import Samples
from mpitrain.device import HOST, choose
from mpitrain.device.choice import look
from mpitrain.device.cuda import Cuda
from mpitrain.device.host import Device
from mpitrain.kernels import Kernels
from mpitrain.objective.elementwise import MeanSquaredError
from mpitrain.training.batches import MicroBatches
from tests import queued_cupy
from tests.queued_cupy.counts import counts
from tests.queued_cupy.memory import POISON


@pytest.fixture
def alone():
    with Communicator(MPI.COMM_SELF, device="staged") as comm:
        yield comm


def asked(device, **parallel):
    return Config(run=Run(device=device), parallel=Parallel(**parallel))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel.offload", '"there"'),
        ("compress.codec", '"int8"'),
        ("sync.kind", '"local"'),
        ("server.ranks", "1"),
        ("federated.clients", "2"),
    ],
)
def test_auto_knows_what_the_cpu_does_alone(tmp_path, key, value):
    path = tmp_path / "job.toml"
    path.write_text('[run]\ndevice = "auto"\n')
    assert needs_host(load(path, [f"{key}={value}"])).startswith(key.partition(".")[0])


def test_auto_takes_the_cpu_where_there_is_no_gpu(monkeypatch, alone, caplog):
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    assert choose(asked("cpu"), None) is HOST
    with caplog.at_level(logging.INFO, "mpitrain"):
        assert choose(asked("auto"), alone) is HOST
    assert "rank 0: CuPy cannot be imported" in caplog.text
    with pytest.raises(ConfigError, match="rank 0: CuPy cannot be imported"):
        choose(asked("cuda"), alone)


def test_auto_takes_a_gpu_that_works(cupy, alone):
    assert choose(asked("auto"), alone).name == "cuda:0 no GPU at all"
    assert choose(asked("auto", offload="there"), alone) is HOST


def test_what_is_wrong_with_a_gpu_is_said(cupy, monkeypatch):
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    assert "sees no GPU" in look(0).why
    cupy = queued_cupy.install(monkeypatch, queued_cupy.Machine(devices=4))
    assert [look(local).number for local in range(6)] == [0, 1, 2, 3, 0, 1]

    def fail():
        raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", fail)
    assert "cudaErrorInsufficientDriver" in look(0).why
    monkeypatch.setattr(cupy, "__version__", "13.4.0")
    assert "bfloat16 needs CuPy 14" in look(0, "bfloat16").why


def test_a_device_puts_and_brings(cupy, monkeypatch):
    device, host = Cuda(0), np.arange(6, dtype=np.float32).reshape(2, 3)
    x = device.put(host)
    host += 1
    assert device.get(x).tolist() == [[0, 1, 2], [3, 4, 5]]
    counts.reset()
    coming = device.snapshot(x.T)
    x += 1
    assert coming._host.tobytes() == bytes([POISON]) * 24  # it is not there yet
    while not coming.done:
        pass
    assert coming.get().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert counts.waited == 0
    assert device.bring(x).get().tolist() == [[1, 2, 3], [4, 5, 6]]
    assert counts.waited == 1
    assert device.put(np.empty((0, 3))).shape == (0, 3)


def test_a_micro_batch_comes_while_the_one_before_it_is_computed():
    begun = []

    class Noting(Device):
        def ahead(self, host):
            begun.append(int(host[0, 0]))
            return super().ahead(host)

    held = {m: Samples(np.full((2, 3), m, np.float64), np.full((2, 1), 10 * m)) for m in (3, 5, 4)}
    source = MicroBatches(held, [], 1, MeanSquaredError(), dtype=np.float32, device=Noting())
    assert (source.inputs(3) == 3).all() and source.inputs(3).dtype == np.float32
    assert begun == [3, 5, 3, 5]
    del begun[:]
    assert [int(source.labels(m)[0, 0]) for m in (3, 5, 4)] == [30, 50, 40]
    assert begun == [30, 50, 40]


def test_a_peak_is_that_of_the_layers_products(monkeypatch):
    seen = []
    monkeypatch.setattr(Kernels, "matmul", lambda _, a, b: seen.append((a.dtype, b is a)))
    assert Device().peak(MPI.COMM_SELF, ml_dtypes.bfloat16) > 0
    assert set(seen) == {(np.dtype(ml_dtypes.bfloat16), True)}


@pytest.mark.parametrize(("choices", "kind"), [(0, np.float32), (9, np.int16), (-1, np.int16)])
def test_integers_stay_where_a_layer_takes_them(choices, kind):
    held = {0: Samples(np.ones((2, 3), np.int16), np.ones((2, 1)))}
    own = {"dtype": np.float32, "choices": choices}
    assert MicroBatches(held, [], 1, MeanSquaredError(), **own).inputs(0).dtype == kind
