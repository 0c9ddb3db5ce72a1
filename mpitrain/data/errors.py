"""What is raised for data that cannot be read."""


class DataError(ValueError):
    """A file of data is not what it should be; the message names it."""
