"""When ranks talk: in every step, after several, or late."""
