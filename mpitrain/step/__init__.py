"""How a step ends: what the ranks tell one another of it, and the update."""
