"""A program's module as layers of the trainer.

``whole`` makes layers of a module, and loads the trained values back; a ``layer`` makes ``calls``
of its part, with batch norm (``norms``) and random numbers (``drawing``, ``draws``) that no
layout of ranks changes.  ``cutting`` gives the stages of a pipeline each a part (``trial`` and
``dataflow`` find what each needs).  ``tensor_parallel`` lets ranks share a module's matrices, as
``splits`` say.
"""
