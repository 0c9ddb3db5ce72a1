"""Checks of user code for the trainer: each runs the code in a probe, and compares results.

``module`` tries whether a module is a function of its parameters and input, ``shared_memory``
whether its tensors lie apart, ``means`` whether losses and metrics are means over samples.
"""
