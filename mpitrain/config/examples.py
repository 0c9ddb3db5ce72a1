"""The example jobs and job scripts: ``jobs/`` here, ``mpitrain/jobs/`` as installed."""

import shutil
from pathlib import Path

from collectives.errors import hint


def folder() -> Path:
    """The folder of the job scripts, in which ``examples/`` has the jobs."""
    installed = Path(__file__).parents[1] / "jobs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "jobs"


def examples() -> dict[str, Path]:
    """The example jobs by name."""
    return {path.stem: path for path in sorted((folder() / "examples").glob("*.toml"))}


def find(job: Path) -> Path:
    """The job file that ``job`` names: itself, or the example if there is no such file.

    Raises:
        ValueError: a bare name that is no example's, or that may mean a file of this folder, too.
    """
    if (job.exists() and not job.is_dir()) or len(job.parts) != 1 or job.suffix:
        return job
    known = examples()
    if job.name not in known:
        raise ValueError(f"no file and no example has this name; {hint(job.name, known)}")
    own = job.with_suffix(".toml")
    if own.exists():
        raise ValueError(f"it may mean {own} here or {known[job.name]}; write one of the two")
    return known[job.name]


def summary(job: Path) -> str:
    """The first line of a job file's comment."""
    return job.read_text().partition("\n")[0].lstrip("# ")


def copy(target: Path) -> Path:
    """Copies the scripts and the examples to ``target/jobs``, and returns that folder.

    Raises:
        FileExistsError: it is there already.
        ValueError: it would lie in what is copied.
        OSError: it cannot be written.
    """
    jobs = target / "jobs"
    if jobs.exists():
        raise FileExistsError(f"{jobs} is there already; name another folder, or remove it")
    if folder().resolve() in jobs.resolve().parents:
        raise ValueError(f"{jobs} lies in {folder()}, which is copied; name another folder")
    try:
        shutil.copytree(folder(), jobs, ignore=shutil.ignore_patterns("__pycache__"))
    except shutil.Error as error:  # a list of all files that could not be copied
        shutil.rmtree(jobs, ignore_errors=True)
        raise OSError(f"{jobs} cannot be written: {error.args[0][0][2]}") from error
    return jobs
