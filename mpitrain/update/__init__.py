"""The update of a step: the ranks agree on its gradient, then change the parameters."""
