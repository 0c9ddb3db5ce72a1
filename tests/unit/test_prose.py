"""Docstrings, comments, errors, help and documents say their subjects."""

import pytest

from tests.prose import bad_sentences, in_document, in_module, offences


def test_every_sentence_has_its_subject():
    """``python -m tests.prose`` prints them all."""
    found = [*offences()]
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    "text",
    [
        "Of the largest buffer of any rank.",
        "Bytes of a buffer. Of unequal blocks, two ranks know most.",
        "The sum. What is left goes to rank 0.",
        "What a layer is: pure functions.",
        "The same within this worker.",
        "**What it leaves** to the library.",
        "name, path: of the file.",
        "*values: those of the caller.",
        "of unequal blocks there is no sum",
        "Starts as many as there are GPUs.",
        "The ranks are told of an error.",
    ],
)
def test_a_sentence_without_a_subject_is_found(text):
    assert list(bad_sentences(text))


@pytest.mark.parametrize(
    "text",
    [
        "Bytes of the largest buffer on any rank; 0 if not every rank can compute it.",
        "Raises what the ranks raised.",
        "path: folder of the checkpoint.",
        "what: a number or text.",
        "Whether all ranks agree.",
        "How many ranks there are.",
        "Ranks that wait e.g. of a server.",
    ],
)
def test_a_sentence_with_a_subject_is_not(text):
    assert not list(bad_sentences(text))


def test_every_place_with_prose_is_read(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""What one is.\n\n    of: it is::\n\n        Of an example.\n\n    Of two.\n"""\n'
        "# Of three\n# lines.\n"
        "x = 4  #: of four\n"
        "parser.add_argument(help='of five')\n"
        "key: Annotated[int, Meta(description='Of six.')]\n"
        "if x:\n    raise ValueError(f'of seven, {x}' if x else 'of eight')\n"
    )
    found = [bad for text in in_module(module) for bad in bad_sentences(text.words)]
    assert sorted(found) == [
        "Of six.", "Of three lines.", "Of two.", "What one is.",
        "of eight", "of five", "of four", "of seven, X",
    ]  # fmt: skip


def test_questions_may_be_headings_of_documents(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "## What is it?\n\nWhat it is.\n\n- Of a list\n- one\n\n```text\nOf code.\n```\n"
    )
    found = [(t.line, bad) for t in in_document(page) for bad in bad_sentences(t.words)]
    assert found == [(3, "What it is."), (5, "Of a list")]
