"""What a GPU must do, as one command: ``python -m tests.gpu.verify``."""
