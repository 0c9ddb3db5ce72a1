"""From a call of mpi4py's kind to the plan that carries it out."""
