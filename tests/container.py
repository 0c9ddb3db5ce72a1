"""Whether the steps of ``jobs/mpitrain.def`` make an image in which a job trains.

    sudo .venv-openmpi/bin/python -m tests.container        # or make container; some five minutes

A Debian made by debootstrap takes the place of the image that Apptainer fetches: the sections
``%files``, ``%post``, ``%environment`` and ``%test`` of the definition are run in it as they stand,
then ``mpitrain doctor`` and a job on 2 ranks of Debian's Open MPI.  Needs root, ``debootstrap`` and
the network; Apptainer itself is not used.  Ends with 1 at the first step that fails.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEFINITION = ROOT / "jobs" / "mpitrain.def"
#: Root may start ranks, and more of them than there are cores, in the image.
SETTINGS = """
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMP_NUM_THREADS=1
cd /root
"""
#: Commands typed in the image, and a pattern of what each says.
COMMANDS = {
    "mpitrain doctor": "0 failed",
    "mpirun -n 2 mpitrain train digits": r"test accuracy 9[78]\.\d\d%, 2 ranks",
}
#: How the machine reaches the network, which the image's %post needs as well.
HANDED_ON = re.compile(r"(?i)(PIP_.*|https?_proxy|no_proxy)")


def sections(definition: str) -> dict[str, str]:
    """The text under each ``%name``; the header under ``""``."""
    parts = re.split(r"^%(\w+)\n", definition, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def release(header: str) -> str:
    """The Debian that ``From:`` names."""
    found = re.search(r"^From: debian:(\w+)-slim$", header, re.MULTILINE)
    if found is None:
        raise SystemExit(f"{DEFINITION.name}: From: names no debian:RELEASE-slim")
    return found[1]


@contextmanager
def mounted(image: Path) -> Iterator[None]:
    """The kernel's file systems are in the image, as in a container."""
    places = []
    try:
        for kind, place in (("proc", "proc"), ("devtmpfs", "dev"), ("tmpfs", "dev/shm")):
            (image / place).mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", kind, kind, image / place], check=True)
            places.append(image / place)
        yield
    finally:
        for place in reversed(places):
            subprocess.run(["umount", "--lazy", place], check=False)


def inside(image: Path, script: str) -> str:
    """Output of a script in the image.

    Raises:
        SystemExit: it failed.
    """
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    environment = {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8"}
    environment |= {name: text for name, text in os.environ.items() if HANDED_ON.fullmatch(name)}
    environment.pop("PIP_FIND_LINKS", None)  # folders of this machine
    done = subprocess.run(
        ["chroot", image, "/bin/sh", "-c", script], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{script.strip()}\n{done.stdout[-3000:]}\nexit code {done.returncode}")
    return done.stdout


def run(*command: object) -> None:
    print("$", shlex.join(map(str, command)), flush=True)
    subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parts = sections(DEFINITION.read_text())
    if os.geteuid() or not shutil.which("debootstrap"):
        raise SystemExit("tests.container needs root and debootstrap: apt-get install debootstrap")
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "image"
        small = ("--variant=minbase", "--include=ca-certificates")
        run("debootstrap", *small, release(parts[""]), image)
        wheels = Path(folder) / "dist"
        run(sys.executable, "-m", "pip", "wheel", "-q", ROOT, "--no-deps", "-w", wheels)
        for line in filter(None, map(str.strip, parts["files"].splitlines())):
            source, target = line.split()
            shutil.copytree(wheels.parent / source, image / target.lstrip("/"))
        for known in ("resolv.conf", "hosts", "ssl/certs/ca-certificates.crt"):
            if (Path("/etc") / known).exists():
                shutil.copy(Path("/etc") / known, image / "etc" / known)
        with mounted(image):
            print("%post", flush=True)
            inside(image, parts["post"])
            inside(image, parts["test"])
            for command, expected in COMMANDS.items():
                said = inside(image, parts["environment"] + SETTINGS + command)
                print(f"$ {command}\n{said.strip().splitlines()[-1]}", flush=True)
                if not re.search(expected, said):
                    raise SystemExit(f"{command} does not say {expected!r}:\n{said}")


if __name__ == "__main__":
    main()
