"""``python -m collectives run``: an unchanged program of mpi4py on our communicator."""
