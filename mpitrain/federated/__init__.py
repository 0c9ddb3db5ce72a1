"""Federated learning: clients keep their samples, and a server averages their changes.

``loop.py`` has the rounds; ``choice.py`` says who takes part, ``split.py`` who has which
samples, ``client.py`` trains, ``sums.py`` adds up, by ``exact_mean.py``, ``codes.py`` or
``secure.py``, ``server.py`` moves the weights.
"""
