"""Data, pipeline and tensor parallel training over MPI, driven by ``collectives``."""
