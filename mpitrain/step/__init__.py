"""The end of a step: the ranks share their reports, then update the parameters."""
