"""Times of collectives and of messages, beside the MPI library's own."""
