"""Federated learning: clients keep their samples, and a server averages their changes.

``trainer.py`` runs the rounds; ``choice.py`` chooses clients, ``split.py`` their samples;
``client.py`` trains, ``sums.py`` adds up, by ``exact_mean.py``, ``codes.py`` or ``secure.py``;
``server.py`` moves the weights.
"""

from mpitrain.federated.errors import RoundError
from mpitrain.federated.trainer import Trainer

__all__ = ["RoundError", "Trainer"]
