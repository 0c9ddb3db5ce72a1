"""Profiles, and digests of data."""

import numpy as np
import pytest

from mpitrain import data
from mpitrain.config import Data
from mpitrain.data.arrays import load_arrays
from mpitrain.data.dataset import Dataset, Samples
from mpitrain.data.map_style import OwnSamples
from mpitrain.data.text import load_text
from mpitrain.pipeline.profiles import ProfileError, parse_profile, read_profile, write_profile


def test_profiles_round_trip(tmp_path):
    text = (
        b"node1 -- Input -- forward_compute_time=0.000, backward_compute_time=0.000, "
        b"activation_size=0.0, parameter_size=0.000\nnode2 -- Linear(in=3) -- "
        b"forward_compute_time=1.5, backward_compute_time=2.5, activation_size=64.0, "
        b"parameter_size=128.0\n\tnode1 -- node2\n"
    )
    found = parse_profile(text, "p")
    assert [layer.forward_s for layer in found] == [0.0, 0.0015]
    assert found[1].parameter_bytes == 128
    write_profile(tmp_path / "p.json", found)
    assert read_profile(tmp_path / "p.json") == found


def node(name, seconds, activation):
    return (
        f"{name} -- {name.upper()} -- forward_compute_time={seconds}, backward_compute_time=0.0, "
        f"activation_size={activation}, parameter_size=1.0\n"
    )


def test_branches_between_two_layers_are_one_layer():
    text = "".join(node(n, s, a) for n, s, a in zip("abcde", (1, 2, 3, 4, 5), (10, 20, 30, 40, 50)))
    text += "".join(f"\t{a} -- {b}\n" for a, b in ("ab", "ac", "bd", "cd", "de"))
    found = parse_profile(text.encode(), "p")
    assert [round(1e3 * layer.forward_s) for layer in found] == [1, 9, 5]
    assert [layer.activation_bytes for layer in found] == [10, 40, 50]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no layers"),
        ("what\n", "line 1: neither a layer nor an edge: 'what'"),
        (node("a", 1, 1) + "\ta -- b\n", "an edge leads to b, which is no layer"),
        (node("a", 1, 1) + node("b", 1, 1) + "\ta -- b\n\tb -- a\n", "in a circle"),
        (node("a", "1-1", 1), "line 1: could not convert"),
        ("[1]", "Expected `object`"),
    ],
)
def test_profiles_that_are_none(text, message):
    with pytest.raises(ProfileError, match=message):
        parse_profile(text.encode(), "p")


def arrays(folder, inputs, labels):
    folder.mkdir()
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "labels.npy", labels)
    return folder


@pytest.mark.parametrize("most", [1 << 26, 1 << 10])
def test_a_digest_is_of_samples_classes_and_numbers(tmp_path, monkeypatch, most):
    """All are read, or some; in several parts."""
    count = 3000
    monkeypatch.setattr("mpitrain.data.digests._ALL", most)
    monkeypatch.setattr("mpitrain.data.digests._AT_ONCE", 1000)
    rng = np.random.default_rng(0)
    inputs, labels = rng.random((count, 5)), rng.integers(0, 3, count)
    first = load_arrays(arrays(tmp_path / "first", inputs, labels), 0.2, np.float64)
    again = load_arrays(tmp_path / "first", 0.2, np.float32)
    assert data.digest(first) == data.digest(again)  # run.dtype is not the data's
    known = {data.digest(first)}
    for name, change in {
        "first": lambda x, y: x.__setitem__((0, 0), 5.0),
        "last": lambda x, y: x.__setitem__((-1, -1), 5.0),
        "labels": lambda x, y: y.__setitem__(0, (y[0] + 1) % 3),
        "classes": lambda x, y: y.__setitem__(0, 3),
        "order": lambda x, y: x.__setitem__(slice(None), x[::-1].copy()),
    }.items():
        x, y = inputs.copy(), labels.copy()
        change(x, y)
        changed = load_arrays(arrays(tmp_path / f"{name}-changed", x, y), 0.2, np.float32)
        known.add(data.digest(changed))
    shorter = load_arrays(arrays(tmp_path / "shorter", inputs[:-5], labels[:-5]), 0.2, np.float32)
    known.add(data.digest(shorter))
    assert len(known) == 7
    inputs[1] = 5.0
    second = load_arrays(arrays(tmp_path / "second", inputs, labels), 0.2, np.float32)
    assert (data.digest(second) in known) == (most < count)


def test_bfloat16_becomes_the_type_of_the_job():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    values = np.array([[0.1], [0.35]], ml_dtypes.bfloat16)
    samples = OwnSamples([(value, value) for value in values], np.float32)
    assert samples[:2].inputs.dtype == samples[:2].labels.dtype == np.float32
    known = {
        data.digest(Dataset(Samples(x, x), None, 0)) for x in (values, values[::-1], 0 * values)
    }
    assert len(known) == 3


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_digits_of_which_a_part_has_too_few(fraction):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    with pytest.raises(data.DataError, match=rf"data\.test_fraction = {fraction} of 1797 digits"):
        data.load(Data(test_fraction=fraction), np.float32)


def test_a_digest_reads_little_of_much(tmp_path, monkeypatch):
    """A thousandth of 300 MB."""
    np.memmap(tmp_path / "train.bin", "<u2", mode="w+", shape=(150_000_000,))
    np.memmap(tmp_path / "val.bin", "<u2", mode="w+", shape=(1000,))
    tokens = load_text(tmp_path / "train.bin", "bytes", 100, 0.2)
    kind, taken = type(tokens.train), []
    read = kind.__getitem__

    def counted(samples, which):
        taken.append(len(which) if isinstance(which, np.ndarray) else 1)
        return read(samples, which)

    monkeypatch.setattr(kind, "__getitem__", counted)
    first = data.digest(tokens)
    assert len(tokens.train) > 1_000_000 and taken == [1, 1024] * 2
    with (tmp_path / "train.bin").open("r+b") as file:
        file.write(b"x")
    assert data.digest(load_text(tmp_path / "train.bin", "bytes", 100, 0.2)) != first
