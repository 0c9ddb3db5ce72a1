"""Suites of other projects over ours, beside the same suites over what they were written for:
``make conformance`` (mpi4py's, beside mpi4py alone), ``make heat`` (Heat's, beside mpi4py) and
``make accelerate-tests`` (Accelerate's, beside Gloo).

Sources come from their projects, in one version each; no copy is kept here.
"""
