"""Losses: their value and their gradient in one call."""

from mpitrain.nn.layer import Array, array_namespace


def softmax_cross_entropy(logits_NC: Array, labels_N: Array, divisor: int) -> tuple[float, Array]:
    """Sum over samples of ``-log softmax(logits)[label] / divisor``, and its gradient by logits.

    With the size of the *global* batch as ``divisor``, the sum over ranks of the values and of the
    gradients is that of the global mean, however the batch was dealt out.

    Args:
        logits_NC: floating point scores; not normalised.
        labels_N: integers in ``0 <= label < C``.
        divisor: number of samples over which the caller averages.
    """
    xp = array_namespace(logits_NC)
    samples = xp.arange(len(labels_N))
    shifted = logits_NC - logits_NC.max(axis=1, keepdims=True)
    log_probability = shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
    loss = -log_probability[samples, labels_N].sum() / divisor
    gradient = xp.exp(log_probability)
    gradient[samples, labels_N] -= 1
    gradient /= divisor
    return float(loss), gradient
