"""The definition of the container image, as far as it is read without a container."""

from tests.container import DEFINITION, release, sections


def test_the_definition_has_every_section_that_is_tried():
    parts = sections(DEFINITION.read_text())
    assert parts.keys() == {"", "files", "post", "environment", "runscript", "test"}
    assert release(parts[""]) == "bookworm"
    assert parts["files"].split() == ["dist", "/opt/dist"]
    assert parts["post"].strip().startswith("set -e"), "a step that fails ends the build"
