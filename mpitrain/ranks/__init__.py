"""A rank among the others and on its machine: errors, threads, requests to stop, locks."""

#: Seconds before SLURM's time limit in which a run saves and ends.
GRACE_S = 120.0
