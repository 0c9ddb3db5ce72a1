"""The shadow: a few samples of the first steps in plain torch, beside the trainer's own layers."""
