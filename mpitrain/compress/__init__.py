"""Codecs for gradients; ``registry.py`` has them by name."""

from mpitrain.compress.registry import CODECS, AnyCodec, CodecError, parse

__all__ = ["CODECS", "AnyCodec", "CodecError", "parse"]
