"""MPI's collective methods in their three forms, those for objects, those that wait for a single
message or for several plans, and those that make other communicators."""
