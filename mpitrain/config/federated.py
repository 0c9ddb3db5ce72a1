"""The table [federated]: clients that train by themselves, and a server that averages them."""

from math import ceil
from typing import Annotated, Literal

from msgspec import Meta, Struct

from mpitrain.config.numbers import Count, NonNegative, Part, Positive, ReadBy, Whole

#: A note on keys that only a job with clients reads.
_OF_CLIENTS = ReadBy("clients")


class Federated(Struct, frozen=True, forbid_unknown_fields=True):
    """[federated]

    Clients have the training samples among them.  In each round some of them are asked; each trains
    as [train] and [optim] say, on its own samples and from the server's weights, and sends what its
    weights have changed by; the server moves its own by the mean.  The clients are simulated on the
    ranks, and their number and what they do are the same on any number of ranks.

    ``train.epochs`` and ``train.batch_size`` are those of a client in a round; schedules of
    [optim], ``evaluate.every`` and ``checkpoint.every`` count rounds.

    Attributes:
        clients: number of clients; 0: training is that of the other tables.
        rounds: rounds of the job.
        split: division of the samples among clients: ``iid``, drawn alike; ``dirichlet``, each
            class in parts that a Dirichlet distribution of ``alpha`` draws (Yurochkin et al. 2019);
            ``labels``, each client samples of ``labels`` classes alone; ``own``, as ``own.clients``
            says.
        alpha: parameter of ``dirichlet``: the smaller it is, the more the clients differ; at most
            1e9, where they hardly do.
        labels: classes of a client's samples, for ``labels``.
        sample: clients asked in a round; 0: all.
        take: clients whose changes count, the first ones to finish; 0: all.  A clock drawn from the
            seed says who finishes first: a client's time is its steps over its speed.
        scheme: ``weighted``, clients drawn evenly, and a mean weighted by their samples;
            ``sampled``, drawn with replacement and with a probability proportional to their
            samples, and a plain mean, which is unbiased (Li et al. 2020).
        weigh: weight of a client in the mean: ``samples``, as the scheme says; ``work``, that times
            the steps it took, for rounds in which some are cut off.
        prox: mu of FedProx: mu times what the weights have moved by is added to each gradient (Li
            et al. 2020).
        prox_step: change of ``prox``, as 0.1: up after a round whose mean loss has risen, down
            after five in turn in which it has fallen; 0: none.
        spread: standard deviation of the logarithms of the clients' speeds; a client of median
            speed takes a step a second.  At most 100: beyond, speeds are no numbers.
        bandwidth: bytes a second that a client of median connection sends, spread likewise; 0:
            changes arrive at once.
        deadline: seconds on that clock after which nothing is received: a slow client sends what
            its steps in time have changed; 0: none.
        dropout: share of the asked clients that are never heard of again, drawn in each round.
        server: optimiser that takes the mean change for a gradient: ``sgd`` (with ``server_lr`` 1
            and no momentum the weights become the clients' mean: FedAvg), ``adam``, ``lamb``.
        server_lr: the server's learning rate.
        server_momentum: momentum of the server's sgd (FedAvgM).
        server_beta1, server_beta2, server_epsilon: parameters of the server's adam and lamb (Reddi
            et al. 2021).
        rotate: changes are rotated before they are coded, so that all their elements are alike:
            random signs and a Hadamard transform (Konecny et al. 2016).
        kept: share of the elements that is sent, drawn in each round.
        bits: bits of a number that is sent, rounded by chance to a grid that all clients share; 0:
            the weights' own, or if ``rotate``, ``kept`` or ``secure`` need a grid, the most that
            fit.
        clip: largest magnitude on the grid, to which larger ones are cut; 0: that of the round's
            largest element, which the clients tell each other.
        secure: the sum is secure (Bonawitz et al. 2017): each client's change is masked by numbers
            that cancel in the sum.  Needs the package cryptography.
        threshold: share of the asked clients that must stay, so that the masks of those that leave
            can be taken off.
    """

    clients: Whole = 0
    rounds: Annotated[Count, _OF_CLIENTS] = 10
    split: Annotated[Literal["iid", "dirichlet", "labels", "own"], _OF_CLIENTS] = "iid"
    alpha: Annotated[float, Meta(gt=0, le=1e9), ReadBy("split", "dirichlet")] = 0.5
    labels: Annotated[Count, ReadBy("split", "labels")] = 2
    sample: Annotated[Whole, _OF_CLIENTS] = 0
    take: Annotated[Whole, _OF_CLIENTS] = 0
    scheme: Annotated[Literal["weighted", "sampled"], _OF_CLIENTS] = "weighted"
    weigh: Annotated[Literal["samples", "work"], _OF_CLIENTS] = "samples"
    prox: Annotated[NonNegative, _OF_CLIENTS] = 0.0
    prox_step: Annotated[NonNegative, _OF_CLIENTS] = 0.0
    spread: Annotated[float, Meta(ge=0, le=100), _OF_CLIENTS] = 0.0
    bandwidth: Annotated[NonNegative, _OF_CLIENTS] = 0.0
    deadline: Annotated[NonNegative, _OF_CLIENTS] = 0.0
    dropout: Annotated[Part, _OF_CLIENTS] = 0.0
    server: Annotated[Literal["sgd", "adam", "lamb"], _OF_CLIENTS] = "sgd"
    server_lr: Annotated[Positive, _OF_CLIENTS] = 1.0
    server_momentum: Annotated[Part, _OF_CLIENTS, ReadBy("server", "sgd")] = 0.0
    server_beta1: Annotated[Part, ReadBy("server", "adam", "lamb")] = 0.9
    server_beta2: Annotated[Part, ReadBy("server", "adam", "lamb")] = 0.99
    server_epsilon: Annotated[Positive, ReadBy("server", "adam", "lamb")] = 1e-3
    rotate: Annotated[bool, _OF_CLIENTS] = False
    kept: Annotated[float, Meta(gt=0, le=1), _OF_CLIENTS] = 1.0
    bits: Annotated[int, Meta(ge=0, le=24), _OF_CLIENTS] = 0
    clip: Annotated[NonNegative, _OF_CLIENTS] = 0.0
    secure: Annotated[bool, _OF_CLIENTS] = False
    threshold: Annotated[float, Meta(gt=0.5, le=1), ReadBy("secure", True)] = 2 / 3

    @property
    def asked(self) -> int:
        """Clients asked in a round."""
        return self.sample or self.clients

    @property
    def taken(self) -> int:
        """Clients whose changes count in a round."""
        return self.take or self.asked

    @property
    def is_coded(self) -> bool:
        """Whether changes are sent as numbers of a grid."""
        return self.rotate or self.kept < 1 or self.bits > 0 or self.secure

    def least(self, asked: int) -> int:
        """Clients that must stay in a secure sum, if ``asked`` of them are asked."""
        return ceil(self.threshold * asked - 1e-9)
