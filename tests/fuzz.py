"""Readers of files that others wrote, with what nobody should write.

Valid files are mutated, cut and spliced, and mixed with random bytes; a reader gives a result or
its own clear error.
"""

import gzip
import io
import os
import random
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from mpitrain.checkpoint.manifest import CheckpointError, Manifest, Progress, SavedPiece, parse
from mpitrain.config import ConfigError, load
from mpitrain.data.arrays import load_arrays
from mpitrain.data.dataset import DataError
from mpitrain.data.idx import parse_idx
from mpitrain.data.text import characters, load_text
from mpitrain.data.tokens import load_tokens
from mpitrain.pipeline.profiles import ProfileError, parse_profile

Reader = Callable[[bytes], object]


def idx(data: bytes) -> object:
    return parse_idx(data, "file")


def manifest(data: bytes) -> object:
    return parse(data, "file")


def profile(data: bytes) -> object:
    return parse_profile(data, "file")


def text(data: bytes) -> object:
    return characters(data, "file")


class _Files:
    """Readers that want a path: memory that looks like a file."""

    def __init__(self) -> None:
        where = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._temporary = tempfile.TemporaryDirectory(dir=where)
        self.folder = Path(self._temporary.name)
        (self.folder / "val.bin").write_bytes(np.arange(40, dtype="<u2").tobytes())

    def config(self, data: bytes) -> object:
        path = self.folder / "job.toml"
        path.write_bytes(data)
        return load(path)

    def tokens(self, data: bytes) -> object:
        (self.folder / "train.bin").write_bytes(data)
        return load_tokens(self.folder, 8)

    def arrays(self, data: bytes) -> object:
        path = self.folder / "all.npz"
        path.write_bytes(data)
        return load_arrays(path, 0.25, np.float32)

    def mapped(self, data: bytes) -> object:
        folder = self.folder / "arrays"
        folder.mkdir(exist_ok=True)
        np.save(folder / "labels.npy", np.arange(4))
        (folder / "inputs.npy").write_bytes(data)
        return load_arrays(folder, 0.25, np.float32)

    def pieces(self, data: bytes) -> object:
        path = self.folder / "text"
        path.write_bytes(data)
        return load_text(path, "bytes", 2, 0.3)


def _saved(save: Callable[..., None], *arrays: np.ndarray, **named: np.ndarray) -> bytes:
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


def seeds() -> dict[str, tuple[Reader, list[bytes], type[Exception]]]:
    """For each reader: itself, valid files, and the error that it may raise."""
    files = _Files()
    plain = b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 4) + bytes(range(24))
    empty = b"\0\0\x08\x04" + struct.pack(">4I", 0, 2, 3, 1)
    inputs, labels = np.arange(8.0).reshape(4, 2), np.arange(4)
    piece = SavedPiece("a", "parameters", "rank-00000.safetensors", "k", 0, 0, 3, 0, 6)
    whole = Manifest(
        1, Progress(3, 3), "{}", "", {"a": [3, 2]}, {"a": "float32"},
        {"rank-00000.safetensors": "0" * 64}, [piece],
    )  # fmt: skip
    pipedream = (
        b"node1 -- Input -- forward_compute_time=0.000, backward_compute_time=0.000, "
        b"activation_size=0.0, parameter_size=0.000\nnode2 -- Linear(in=3) -- "
        b"forward_compute_time=1.5, backward_compute_time=2.5, activation_size=64.0, "
        b"parameter_size=128.0\n\tnode1 -- node2\n"
    )
    return {
        "idx": (idx, [plain, empty, gzip.compress(plain)], DataError),
        "arrays": (
            files.arrays,
            [
                _saved(np.savez, inputs=inputs, labels=labels),
                _saved(np.savez_compressed, inputs=inputs, labels=labels),
            ],
            DataError,
        ),
        "mapped": (files.mapped, [_saved(np.save, inputs), _saved(np.save, labels)], DataError),
        "pieces": (files.pieces, [b"so many tokens", b""], DataError),
        "manifest": (manifest, [msgspec.json.encode(whole)], CheckpointError),
        "profile": (
            profile,
            [
                pipedream,
                b'[{"name":"a","forward_s":1,"backward_s":2,"activation_bytes":3,'
                b'"parameter_bytes":4}]',
            ],
            ProfileError,
        ),
        "text": (text, ["Süße Verse, naïve\n".encode(), b"plain"], DataError),
        "config": (
            files.config,
            [b'[run]\nseed = 3\n[model]\nkind = "mlp"\nhidden = [4, 3]\n[optim]\nlr = 1e-2\n'],
            ConfigError,
        ),
        "tokens": (files.tokens, [np.arange(50, dtype="<u2").tobytes()], DataError),
    }


def mutated(rng: random.Random, valid: list[bytes]) -> bytes:
    """Something between a valid file and noise."""
    data = bytearray(rng.choice(valid))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 8))):
        kind = rng.randrange(6)
        at = rng.randrange(len(data) + 1)
        if kind == 0 and data:
            data[at % len(data)] = rng.randrange(256)
        elif kind == 1 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 4:
            other = rng.choice(valid)
            data[at:] = other[rng.randrange(len(other) + 1) :]
        else:
            digit = rng.choice((b"-1", b"9" * rng.randrange(1, 25), b"1e999", b"null", b"[[", b'"'))
            data[at : at + len(digit)] = digit
    return bytes(data) if rng.random() > 0.02 else rng.randbytes(rng.randrange(200))


def fuzz(name: str, cases: int, seed: int = 0) -> Counter[str]:
    """Outcomes of a reader: ``read`` or the error's name.  Anything else passes through."""
    reader, valid, expected = seeds()[name]
    rng = random.Random(f"{name} {seed}")
    outcomes: Counter[str] = Counter()
    for case in range(cases):
        data = mutated(rng, valid)
        try:
            reader(data)
            outcomes["read"] += 1
        except expected as error:
            if "\n" in str(error).strip() and name != "config":
                raise AssertionError(f"case {case}: not one sentence: {error}") from error
            outcomes[expected.__name__] += 1
        except Exception as error:
            raise AssertionError(f"case {case} of {name}: {data!r}: {error!r}") from error
    return outcomes
