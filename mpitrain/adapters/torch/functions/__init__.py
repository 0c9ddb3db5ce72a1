"""Functions that a program gives beside its module: of torch's tensors and parameters.

``objective`` calls losses and metrics; ``reductions`` find out what their means are over, and
``equal_weights`` whether any other mean is one over samples; ``lent`` has what a loss reads of the
module.  ``optimizer`` takes torch's steps on the trainer's flat pieces, for each of the program's
``groups`` and at the rates of its ``scheduler``; ``optimizer_state`` hands the state back.
"""
