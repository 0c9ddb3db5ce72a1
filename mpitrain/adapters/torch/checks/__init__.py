"""Checks of a program's module before and in its calls: each fault names a way out.

``module_class`` refuses modules by their parts, and ``shared_memory`` by where their tensors lie.
``module`` watches calls and finds whose random numbers a module draws, and ``share`` compares what
tensor ranks have of it with the whole.  All of them use ``probe``.
"""
