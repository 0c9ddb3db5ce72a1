"""The error of a job that cannot be."""


class ConfigError(ValueError):
    """The job asks for something that does not exist or cannot be."""
