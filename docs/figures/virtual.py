"""Trains on eight virtual ranks, and draws virtual.svg: ``python -m docs.figures.virtual``."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from docs.figures.drawing import FOLDER
from mpitrain.metrics.trace import TRACE_FILE, read_trace
from mpitrain.pipeline.profiles import LayerProfile, write_profile
from mpitrain.report.figures import gantt

#: Where the report has the colours of its pages.
STYLE = Path(__file__).parents[2] / "mpitrain/report/pages/style.css"


def main() -> None:
    """Two stages of two replicas of two tensor ranks; the picture has their last step."""
    names = ["embedding", "block0", "block1", "block2", "block3", "head"]
    layers = [LayerProfile(name, 4e-3, 8e-3, 0, 0) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        write_profile(costs := Path(folder) / "costs.json", layers)
        words = ["gpt_3d", "--virtual", "8", "--async-progress", "--costs", str(costs)]
        words += ["--set", f"run.dir={folder}", "--set", "train.steps=3"]
        subprocess.run([sys.executable, "-m", "mpitrain", "train", *words], check=True)
        drawn = gantt(read_trace(Path(folder) / TRACE_FILE))
    colours = STYLE.read_text().partition("\n* ")[0].replace(":root", "svg")
    look = f"<style>{colours} svg {{ background: var(--page); font-family: sans-serif }}</style>"
    picture = re.sub(r"(<svg[^>]*>)", rf"\1{look}", re.sub("</?div[^>]*>", "", drawn), count=1)
    (FOLDER / "virtual.svg").write_text(picture + "\n")


if __name__ == "__main__":
    main()
