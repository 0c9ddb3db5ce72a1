"""Proofs, costs, simulations and pictures of schedules; nothing here needs MPI."""
