"""Functions that a program gives beside its module: of torch's tensors and parameters.

``objective`` calls losses and metrics; ``reductions`` and ``own_loss`` find out what their means
are over.  ``optimizer`` steps over the trainer's flat pieces, ``scheduler`` says at which rate, and
``optimizer_state`` hands the state back to the program.
"""
