"""Methods of training x algorithms x layouts x links: what pays on which link."""
