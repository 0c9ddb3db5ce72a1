"""The documents: their links lead somewhere, their snippets run, their commands can be typed."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import pytest

from collectives.__main__ import main as collectives
from docs.figures import experts, objects, shares, space
from mpitrain.__main__ import main as mpitrain
from mpitrain.config import examples, load
from tests.cases import slow_case
from tests.documents import (
    DOCUMENTS,
    ROOT,
    anchors,
    blocks,
    commands,
    links,
    make_targets,
    make_variables,
    parse,
    prose,
    snippets,
)

LAUNCHER = os.environ.get("MPIEXEC", "mpirun")
every_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)
SNIPPETS = [
    pytest.param(text, id=f"{path.name}:{line}")
    for path in DOCUMENTS
    for line, text in snippets(path)
]
#: They begin with their imports, and need nothing else but the document's earlier ones.
WHOLE = [s for s in SNIPPETS if s.values[0].startswith(("import ", "from "))]
COMMANDS = {
    tuple(words): f"{path.relative_to(ROOT)}: {' '.join(words)}"
    for path in [*DOCUMENTS, *sorted(ROOT.glob("jobs/examples/*.toml"))]
    for words in commands(path)
}
#: As pyproject.toml declares them; without it, they are typed as ``python -m``.
CONSOLE_COMMANDS = (
    tomllib.loads((ROOT / "pyproject.toml").read_text()).get("project", {}).get("scripts", {})
)
#: Commands of a second or two, without ranks and without files that other commands write.
CHEAP = {
    "collectives": ("list", "cost", "draw", "fit", "explore"),
    "mpitrain": ("schedules", "submit", "examples", "keys"),
}


@every_document
def test_blocks_are_of_kinds_that_are_tested(document):
    """Text that a reader types is in a console with prompts, or is Python."""
    assert document.read_text().count("```") == 2 * len(blocks(document))
    for language, block in blocks(document):
        assert language in ("console", "bash", "python", "toml", "text", "")
        assert "..." not in block.splitlines(), "output is whole, or its lines say what they are"
        typed = re.search(r"^(\w*\$|#) ", block, re.M) is not None
        assert typed == (language == "console") or language in ("bash", "python")


@every_document
def test_parts_of_jobs_are_jobs(document, tmp_path):
    for language, block in blocks(document):
        if language == "toml":
            (tmp_path / "job.toml").write_text(block)
            load(tmp_path / "job.toml")


@every_document
def test_links_lead_somewhere(document):
    for target in links(document):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), f"{target}: there is no such file"
        assert found.is_relative_to(ROOT), f"{target}: outside of the repository"
        if anchor:
            assert anchor in anchors(found), f"{target}: there is no such heading"


def test_every_page_is_in_the_menu_of_the_site():
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in menu, f"add {page.name} to nav in mkdocs.yml"


@every_document
def test_files_in_the_text_exist(document):
    bases = [ROOT, document.parent, *(ROOT / name for name in ("collectives", "mpitrain", "jobs"))]
    for name in re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|md|toml|sbatch|sh))`", prose(document)):
        known = any((base / name).exists() for base in bases)
        assert known or "NAME" in name, f"{name}: there is no such file"


@pytest.mark.parametrize("package", ["collectives", "mpitrain"])
def test_the_map_has_every_folder(package):
    text = (ROOT / "docs/structure.md").read_text()
    for path in (ROOT / package).iterdir():
        if (path / "__init__.py").exists():
            assert f"`{path.name}/`" in text


PICTURES = {program.FILE: program.svg for program in (objects, experts, space)}
PICTURES |= {shares.FOLDER / f"{name}.svg": draw for name, draw in shares.FIGURES.items()}


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_what_its_program_draws(path):
    assert path.read_text() == PICTURES[path]()


def test_variables_in_the_text_are_read():
    read = "".join(
        path.read_text()
        for folder in ("collectives", "mpitrain", "jobs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh", ".sbatch")
    )
    text = "".join(document.read_text() for document in DOCUMENTS)
    for name in set(re.findall(r"\b(?:COLLECTIVES|MPITRAIN)_[A-Z_]+\b", text)):
        assert name in read, f"nothing reads {name}"


def test_snippets_compile():
    for snippet in SNIPPETS:
        compile(snippet.values[0], snippet.id, "exec")


@pytest.mark.parametrize("of_torch", [False, slow_case(True)])
def test_whole_snippets_run(tmp_path, of_torch):
    """One behind the other in one launch; those of a document have their names in common."""
    if of_torch and find_spec("torch") is None:
        pytest.skip("torch is not installed")
    texts = [(*param.id.split(":"), param.values[0]) for param in WHOLE]
    need_torch = {document for document, _, text in texts if "import torch" in text}
    texts = [one for one in texts if (one[0] in need_torch) == of_torch]
    assert len(texts) > 2
    code = (
        "from collections import defaultdict\nnames = defaultdict(dict)\n"
        f"for document, line, text in {texts!r}:\n"
        "    exec(compile(text, f'{document}:{line}', 'exec'), names[document])"
    )
    launch = [LAUNCHER, "-n", "2"] if shutil.which(LAUNCHER) else []
    done = subprocess.run(
        [*launch, sys.executable, "-c", code], cwd=tmp_path, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_ring_that_is_shown_is_the_ring():
    page = ROOT / "docs/invent.md"
    (shown,) = [ast.parse(text) for _, text in snippets(page) if "_circulate" in text]
    real = ast.parse((ROOT / "collectives/algorithms/ring.py").read_text())

    def code(tree):
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        for function in functions:
            if ast.get_docstring(function):
                del function.body[0]
        return {function.name: ast.dump(function) for function in functions}

    assert code(shown).items() <= code(real).items()
    assert len(code(shown)) == 3


def test_the_plan_that_is_shown_is_printed(capsys):
    text = (ROOT / "docs/cluster.md").read_text()
    command, *shown = text[text.index("mpitrain plan ") :].partition("\n```")[0].splitlines()
    assert mpitrain(command.partition(" |")[0].split()[1:]) == 0
    assert capsys.readouterr().out.splitlines()[: len(shown)] == shown


def test_commands_can_be_typed():
    wrong = {}
    for words, where in COMMANDS.items():
        try:
            check(list(words))
        except AssertionError as error:
            wrong[where] = str(error)
    assert not wrong


def program(words):
    """Program that is run, and its words, without variables, launchers and interpreters."""
    rest = list(words)
    while rest and re.fullmatch(r"[A-Z_]+=.*|sudo", rest[0]):
        rest.pop(0)
    if rest[:1] and rest[0] in ("mpirun", "mpiexec", "srun"):
        at = [i for i, word in enumerate(rest) if is_program(word)]
        rest = rest[at[0] :] if at else rest
    if rest and re.search(r"python3?$|\$MPITRAIN_PYTHON", rest[0]) and rest[1:2] == ["-m"]:
        rest = rest[2:]
    return rest[0] if rest else "", rest[1:]


def is_program(word):
    return word in ("collectives", "mpitrain") or re.search(r"python$|\$MPITRAIN_PYTHON", word)


def check(words):
    """Raises ``AssertionError`` for a command that cannot be typed here."""
    name, rest = program(words)
    if name in ("collectives", "mpitrain") and name in words and len(words) > 2:
        assert "-m" in words or name in CONSOLE_COMMANDS, f"{name} is not installed as a command"
    if "--" in rest and name.startswith("tests."):
        inner = rest[rest.index("--") + 1 :]
        check(["python", *inner] if inner[0] == "-m" else inner)
        rest = rest[: rest.index("--")]
    for path in (re.split("[:,]", word.rpartition("=")[2])[0] for word in rest):
        if re.match(r"(jobs|docs|tests|examples|benchmarks|collectives|mpitrain)/", path):
            assert (ROOT / path).exists(), f"there is no {path}"
    if name in ("collectives", "mpitrain"):
        check_options(name, rest)
    elif name == "make":
        check_make(rest)
    elif name == "python":
        assert rest[:1] and rest[0].endswith(".py"), "python runs a module or a file"
    elif name.startswith(("tests.", "benchmarks.", "collectives.", "docs.")):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"no {name}"
    else:
        known = "pytest sbatch bash git cd source export cat tail apt pip srun kill munge scontrol"
        more = "venv ucx_info ibstat dmesg sacct module conda qsub apt-get mkdir ln pjsub spack"
        assert name in f"{known} {more} head nvidia-cuda-mps-control".split(), f"what is {name}?"


def check_options(name, words):
    if len(words) < 2:  # its name, in a sentence
        words = [*words, "--help"]
    options = parse(name, words)
    config = getattr(options, "config", None)
    if config is not None and (config.is_relative_to("jobs") or len(config.parts) == 1):
        if config.name in ("job.toml", "CONFIG", "train.py"):
            return  # the reader's own
        try:
            load(ROOT / examples.find(config), options.set)
        except ValueError as error:
            raise AssertionError(str(error)) from error


def check_make(words):
    for word in words:
        variable, equals, _ = word.partition("=")
        if equals:
            assert variable in make_variables(), f"the Makefile reads no {variable}"
        else:
            assert any(target.fullmatch(word) for target in make_targets()), f"no target {word}"


def is_cheap(words):
    name, rest = program(words)
    reads = [ROOT / word for word in rest if word.endswith((".csv", ".json", ".toml"))]
    named = rest in (["draw"], ["explore"], ["fit"], ["submit"])  # in a sentence
    known = rest[:1] and rest[0] in CHEAP.get(name, ())
    if rest[:1] == ["submit"] and "--dry-run" not in rest:
        return False
    takes_long = rest[:1] == ["schedules"] and "-o" in rest  # test_report.py draws some
    return known and not named and not takes_long and all(path.exists() for path in reads)


@pytest.mark.parametrize("words", [*filter(is_cheap, COMMANDS)], ids=" ".join)
def test_cheap_commands_run(words, tmp_path, monkeypatch, capsys):
    name, rest = program(words)
    for kept in ("jobs", "docs", "examples", "README.md"):
        (tmp_path / kept).symlink_to(ROOT / kept)
    monkeypatch.chdir(tmp_path)
    assert {"collectives": collectives, "mpitrain": mpitrain}[name](rest) == 0
    assert capsys.readouterr().out
