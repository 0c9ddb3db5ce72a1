"""Trials of a program's code before the trainer relies on it: each fault names a way out.

``module_class`` refuses modules by their parts, and ``shared_memory`` by where their tensors lie.
``module`` calls one to see whether it is a function of its parameters and input that keeps samples
apart; ``means`` compares losses and metrics with means over samples.  All of them use ``probe``.
"""
