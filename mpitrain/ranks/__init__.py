"""A rank among the others and on its machine: errors, threads, requests to stop, locks."""
