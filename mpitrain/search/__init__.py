"""Search for the fastest layout of a job, by a model of its layers and of the machine."""
