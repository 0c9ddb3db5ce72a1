"""Gradients in fewer bytes: codes of three kinds, by what of them adds up over ranks."""

from mpitrain.compress.codec import Codec, Linear, Sketch, Sparse
from mpitrain.compress.table import CODECS, CodecError, Compressor, parse

__all__ = ["CODECS", "Codec", "CodecError", "Compressor", "Linear", "Sketch", "Sparse", "parse"]
