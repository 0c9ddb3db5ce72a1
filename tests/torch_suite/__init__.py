"""PyTorch's own distributed tests, on the ranks of one MPI job: ``python -m tests.torch_suite``."""
