"""Torch modules as layers of the trainer, and replicas with our communication."""

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from mpitrain.config import Config, Data, Optim, Parallel, Run, Train
from mpitrain.trainer import Trainer

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.mpi

RANKS = MPI.COMM_WORLD.size


def module():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU()),
        torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.ReLU()),
        torch.nn.Linear(32, 10),
    ).double()


def job(**parallel):
    return Config(
        run=Run(dtype="float64"),
        data=Data("digits"),
        optim=Optim(lr=0.1),
        train=Train(epochs=1, batch_size=48, micro_batches=4 if parallel else 1),
        parallel=Parallel(**parallel),
    )


def losses(comm, config):
    from mpitrain.adapters.torch import layers

    with Trainer(comm, config, layers=layers(module())) as trainer:
        return [record.loss for _, record in zip(range(20), trainer.run_epoch(0))]


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        dict(zero=2),
        dict(zero=3),
        dict(pipe=RANKS),
        dict(pipe=RANKS, schedule="zero_bubble"),
        dict(recompute=True),
    ],
    ids=str,
)
def test_torch_layers_train_as_in_torch_alone(comm, parallel):
    if parallel.get("pipe", 1) > 4:
        pytest.skip("the module has 4 parts")
    config = job(**parallel)
    found = losses(comm, config)

    whole = module()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1 * 48 / 64, momentum=0.9)
    with Communicator(MPI.COMM_SELF) as one, Trainer(one, job()) as trainer:
        data, batches = trainer.data.train, list(trainer.sampler.batches(0))[:20]
    expected = []
    for batch in batches:
        some = data[batch]
        optimizer.zero_grad()
        scores = whole(torch.from_numpy(some.inputs))
        loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(some.labels))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("overlap", [True, False])
def test_replicas_with_our_communication_train_as_one(comm, overlap):
    from mpitrain.adapters.torch import DataParallel

    torch.manual_seed(comm.rank)  # rank 0's parameters are everybody's
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(8, RANKS * 4, 64)), rng.integers(0, 10, (8, RANKS * 4))
    own = slice(4 * comm.rank, 4 * comm.rank + 4)
    with DataParallel(comm, module(), bucket_bytes=2000, overlap=overlap) as replica:
        parameters = [p.data_ptr() for p in replica.module.parameters()]
        gradients = [p.grad.data_ptr() for p in replica.module.parameters()]
        optimizer = torch.optim.SGD(replica.module.parameters(), lr=0.1)
        for batch, truth in zip(x, labels):
            scores = replica(torch.from_numpy(batch[own]))
            torch.nn.functional.cross_entropy(scores, torch.from_numpy(truth[own])).backward()
            replica.reduce()
            optimizer.step()
            replica.zero_grad()
        # Nothing was copied to another place.
        assert parameters == [p.data_ptr() for p in replica.module.parameters()]
        assert gradients == [p.grad.data_ptr() for p in replica.module.parameters()]
        found = replica.parameters.copy()
    assert len(set(comm.allgather(found.tobytes()))) == 1

    alone = module()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch, truth in zip(x, labels):
        optimizer.zero_grad()
        scores = alone(torch.from_numpy(batch))
        torch.nn.functional.cross_entropy(scores, torch.from_numpy(truth)).backward()
        optimizer.step()
    expected = np.concatenate(
        [p.detach().numpy().ravel() for p in reversed(list(alone.parameters()))]
    )
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-13)


def test_parameters_of_several_types_are_refused(comm):
    from mpitrain.adapters.torch import DataParallel

    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
    with pytest.raises(ValueError, match="of one type on the CPU"):
        DataParallel(comm, mixed)
