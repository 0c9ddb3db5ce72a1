"""Proofs, costs, simulations and pictures of schedules; nothing here needs MPI."""

from collectives.analysis.page import fill
from collectives.analysis.topology import NETWORK, NODE, LinkCost
from collectives.analysis.user_code import executed, resolve

__all__ = ["NETWORK", "NODE", "LinkCost", "executed", "fill", "resolve"]
