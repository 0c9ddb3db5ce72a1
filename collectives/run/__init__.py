"""``python -m collectives run``: an unchanged program of mpi4py on our communicator.

Importing this package imports no MPI: a program may set ``mpi4py.rc`` first.
"""
