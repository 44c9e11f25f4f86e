"""What users see under torchrun when something goes wrong on one rank: ``python -m tests.docs.torchrun_transcripts``.

Writes the transcripts of docs/troubleshooting.md, each between ``<!-- torchrun: FAULT -->`` and ``<!-- end -->``.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "troubleshooting.md"
JOB: Final = ROOT / "tests" / "engine" / "runtime" / "torchrun_job.py"
MARKED: Final = re.compile(r"(<!-- torchrun: (.*?) -->\n```\n)(.*?)(```\n<!-- end -->)", re.DOTALL)
FAULTS: Final = ("package", "version", "hook", "setup: exit", "step: kill")
_FEATURE: Final = '''from mindspeed.plugins import Category, Feature, FeatureSpec, hookimpl


class Clip(Feature):
    """Clips gradients."""

    spec = FeatureSpec("acme-clip", Category.TOOL)

    @hookimpl
    def activated(self):
        {statement}
'''


def install(folder: Path, version: str, statement: str = "pass") -> None:
    """Lay a package with one feature out as an installer does."""
    info = folder / f"acme_ms-{version}.dist-info"
    info.mkdir(parents=True)
    (folder / "acme_clip.py").write_text(_FEATURE.format(statement=statement))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-ms\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[mindspeed.features]\nacme-clip = acme_clip:Clip\n")


def run(fault: str, folder: Path) -> tuple[str, float | None]:
    """Run two ranks, and return what they and torchrun print, and the seconds from a fault of the script to their end."""
    shutil.copy(JOB, folder / "train.py")
    install(folder / "packages" / "rank0", "1.0")
    if fault != "package":
        statement = 'raise OSError("no space on /scratch")' if fault == "hook" else "pass"
        install(folder / "packages" / "rank1", "1.1" if fault == "version" else "1.0", statement)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_", "SLURM_"))}
    variables |= {"FAULT": fault, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    ended, mark = time.time(), folder / "fault"
    return done.stdout, ended - float(mark.read_text()) if mark.exists() else None


def shown(text: str, folder: Path) -> list[str]:
    """The lines that depend on the fault: of the ranks, and of torchrun's summary, without times, ids and its traceback."""
    text = re.sub(r"^Traceback.*?^torch\.distributed\.elastic\S*ChildFailedError: \n", "", text, flags=re.DOTALL | re.MULTILINE)
    text = text.replace(str(folder), "/job").replace(f"on {socket.gethostname()}", "on node-1")
    text = re.sub(r"^(\[rank\d\]: )Traceback.*?(?=^\1\w+Error: )", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\(pid: \d+\)", "(pid: 4242)", text)
    text = re.sub(r"(?<=\[127\.0\.0\.1\]:)\d+", "29500", text)
    text = re.sub(r"\[/\S*/third_party/gloo/", "[", text)
    text = re.sub(r"(RuntimeError: .*gloo.*?127\S+).*", r"\1 ...", text)
    kept = re.compile(r"(\[?rank ?\d\]?: |  because: |  where: |  fix: |Root Cause|\[0\]:$|  rank  |  exitcode )")
    return [line.rstrip() for line in text.splitlines() if kept.match(line)]


def transcript(fault: str) -> list[str]:
    """What the page shows of a fault."""
    with tempfile.TemporaryDirectory() as folder:
        text, _ = run(fault, Path(folder))
        lines = shown(text, Path(folder))
    root = (
        lines.index("Root Cause (first observed failure):") if "Root Cause (first observed failure):" in lines else len(lines)
    )
    ranks = [line for line in lines[:root] if not line.startswith(("  rank  ", "  exitcode ", "[0]:"))]
    return ranks + lines[root:]


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    made = {fault: "".join(f"{line}\n" for line in transcript(fault)) for fault in FAULTS}
    PAGE.write_text(MARKED.sub(lambda found: found[1] + made[found[2]] + found[4], page), encoding="utf-8")


if __name__ == "__main__":
    main()
