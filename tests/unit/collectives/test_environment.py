"""Environment variables as people write them."""

import pytest

from collectives.environment import choice, seconds, switch


def test_words_are_on_or_off():
    assert all(switch("A", {"A": word}) for word in ("1", "true", "True", "YES", "on", " on "))
    off = ("0", "false", "FALSE", "no", "off", "", " ")
    assert not any(switch("A", {"A": word}) for word in off) and not switch("A", {})


@pytest.mark.parametrize("word", ["2", "ture", "nope", "0.0", "-1"])
def test_a_word_that_is_neither_is_named(word):
    with pytest.raises(ValueError) as raised:
        switch("COLLECTIVES_CHECK", {"COLLECTIVES_CHECK": word})
    assert str(raised.value) == (
        f"COLLECTIVES_CHECK={word!r} is neither on (1, true, yes, on) nor off (0, false, no, off, "
        "or nothing)"
    )


def test_a_choice_that_is_none_is_named_with_its_variable():
    words = ("auto", "direct", "staged")
    assert [choice("A", words, {"A": text}) for text in ("", " direct ")] == ["auto", "direct"]
    with pytest.raises(ValueError) as raised:
        choice("COLLECTIVES_DEVICE", words, {"COLLECTIVES_DEVICE": "gpu"})
    assert str(raised.value) == "COLLECTIVES_DEVICE='gpu' is none of auto, direct and staged"


def test_seconds():
    for text, value in (("3", 3.0), (" 1.5 ", 1.5), ("1e3", 1000.0), ("", None), (" ", None)):
        assert seconds("A", {"A": text}) == value
    assert seconds("A", {}) is None


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "1e999", "ten", "5s"])
def test_seconds_that_are_none_are_named(text):
    with pytest.raises(ValueError, match="must be a number of seconds; 0 is") as raised:
        seconds("COLLECTIVES_TIMEOUT", {"COLLECTIVES_TIMEOUT": text})
    assert f"COLLECTIVES_TIMEOUT={text!r}" in str(raised.value)
