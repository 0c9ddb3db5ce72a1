"""Several arrays of each sample in one array, and back."""

import numpy as np
import pytest

from mpitrain.fields import as_given, fields, joined, named


@pytest.mark.parametrize(
    "values",
    [
        np.arange(3.0),
        (np.arange(3.0), np.arange(6).reshape(3, 2)),
        {"one": np.ones((3, 2), "f4"), "two": np.array([True, False, True])},
    ],
)
def test_there_and_back(values):
    array = joined(named(values))
    assert len(array) == 3
    found = as_given(fields(array))
    assert type(found) is type(values)
    wanted, got = named(values), named(found)
    assert wanted.keys() == got.keys()
    for name, part in wanted.items():
        assert part.dtype == got[name].dtype
        np.testing.assert_array_equal(part, got[name])
    np.testing.assert_array_equal(fields(array[1:2])[next(iter(wanted))], got[next(iter(got))][1:2])


@pytest.mark.parametrize("key", ["", "0", "a b", 3])
def test_keys_that_are_no_names(key):
    with pytest.raises(ValueError, match="is not a name of an argument"):
        named({key: 1})


def test_parts_of_other_lengths():
    with pytest.raises(ValueError, match=r"different lengths: \[2, 3\]"):
        joined({"0": np.zeros(2), "1": np.zeros(3)})
