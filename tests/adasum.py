"""Adasum of vectors in one process, for comparison."""

import numpy as np

from mpitrain.compress.adasum import levels, pair


def adasum(vectors):
    """The Adasum of the vectors of p ranks, any p, for one tensor; shape and type of the first.

    Args:
        vectors: changes of weights, or gradients, in the order of ranks.
    """
    parts = [np.asarray(vector, np.float64) for vector in vectors]
    for level in levels(len(parts)):
        for keeps, gives in level:
            parts[keeps] = pair(parts[keeps], parts[gives])
    return parts[0].astype(vectors[0].dtype)
