"""When ranks talk: in every step, after several, late, or without those that come last."""
