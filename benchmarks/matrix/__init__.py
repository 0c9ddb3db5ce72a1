"""Methods of training x algorithms x layouts x links: which one pays on which link."""
