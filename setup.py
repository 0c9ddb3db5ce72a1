"""Which packages there are; all else is in pyproject.toml, and the other files in MANIFEST.in."""

from setuptools import find_packages, setup

# The example jobs and job scripts of jobs/ are installed as mpitrain/jobs/.
JOBS = ["mpitrain.jobs", "mpitrain.jobs.examples", "mpitrain.jobs.sites"]

if __name__ == "__main__":
    setup(
        packages=[*find_packages(include=["collectives*", "mpitrain*"]), *JOBS],
        package_dir={"mpitrain.jobs": "jobs"},
        include_package_data=True,
    )
