"""Build, check and try a release: ``python -m tools.release``, or ``make release``.

They are built from a copy of the package that has every page of `build/pages`, which `make release` has made. The wheel is
built from the source distribution, so both are tried. It is installed into a new environment, and the commands of a first day
run in an empty folder, where nothing of the checkout can be imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DIST: Final = ROOT / "dist"
PAGES: Final = ROOT / "build" / "pages"
SOURCE: Final = ROOT / "build" / "release" / "source"
ENVIRONMENT: Final = ROOT / "build" / "release" / "fresh"
FIRST_DAY: Final = (
    "mindspeed --version",
    "mindspeed features list",
    "mindspeed features check tensor-parallel --tp 2 --world-size 2 --num-attention-heads 4 --num-query-groups 4 "
    "--ffn-hidden-size 128 --vocab-size 512 --num-experts 0",
    "mindspeed explain MS304",
    "mindspeed docs install cli ring-attention",
    "mindspeed ops build",
    "mindspeed pretrain --nproc 2 --tp 2 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 10 --features rms-norm,swiglu",
)


def main() -> None:
    """Run every step, each with its command and time. A step that fails ends it with that step's exit status."""
    for old in DIST.glob("mindspeed-*"):
        old.unlink()
    copy_source()
    _run([sys.executable, "-m", "build", "--outdir", str(DIST), "."], cwd=SOURCE, quiet=True)
    built = sorted(map(str, DIST.iterdir()))
    _run([sys.executable, "-m", "twine", "check", "--strict", *built], cwd=ROOT)
    venv.create(ENVIRONMENT, clear=True, with_pip=True)
    pip = [str(ENVIRONMENT / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "torch==2.13.0"], cwd=ROOT, quiet=True)
    (wheel,) = (name for name in built if name.endswith(".whl"))
    if missing := missing_pages(Path(wheel)):
        sys.exit(f"the wheel lacks {', '.join(missing)}")
    _run([*pip, f"{wheel}[train]"], cwd=ROOT, quiet=True)
    folder = ENVIRONMENT.parent / "empty"
    folder.mkdir(exist_ok=True)
    for command in FIRST_DAY:
        _run(command.split(), cwd=folder)


def copy_source() -> None:
    """Copy what a distribution is built from, with the made pages in the place of the link to the guides."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "mindspeed", SOURCE / "mindspeed", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "csrc", SOURCE / "csrc")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, SOURCE)
    (SOURCE / "mindspeed" / "pages").unlink()
    shutil.copytree(PAGES, SOURCE / "mindspeed" / "pages", ignore=shutil.ignore_patterns("examples"))


def missing_pages(wheel: Path) -> list[str]:
    """Return the pages that a wheel lacks."""
    names = set(zipfile.ZipFile(wheel).namelist())
    pages = (file for file in (SOURCE / "mindspeed" / "pages").rglob("*") if file.suffix in (".md", ".html"))
    return sorted(name for file in pages if (name := file.relative_to(SOURCE).as_posix()) not in names)


def _run(command: list[str], cwd: Path, quiet: bool = False) -> None:
    """Run one step in the fresh environment's PATH, with nothing of this checkout on Python's path."""
    print("$", " ".join(command), flush=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MINDSPEED_", "PYTHON"))}
    env |= {"PATH": f"{ENVIRONMENT / 'bin'}{os.pathsep}{env['PATH']}", "MINDSPEED_CACHE": str(ENVIRONMENT.parent / "cache")}
    start = time.monotonic()
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.DEVNULL if quiet else None, check=False)
    print(f"  [exit {done.returncode}, {time.monotonic() - start:.0f} s]", flush=True)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
