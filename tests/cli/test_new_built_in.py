"""``make feature`` in a copy of the tree: after the one command the default tests that look at features pass."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed.cli.feature_new import KINDS
from mindspeed.engine.inspection.contracts import BASELINE, contract_for
from mindspeed.engine.inspection.releases import recorded_releases
from tests.cli.test_new import write_texts

ROOT = Path(__file__).resolve().parents[2]
TARGET = "megatron.core.transformer.transformer_block:TransformerBlock.forward"
WRAPPED = "megatron.core.transformer.mlp:MLP.forward"
GLUE = {
    "Wrap ``MLP.forward``: hidden states [S, B, H] -> (output [S, B, H], bias).": "Wrap ``TransformerBlock.forward``.",
    "output_SBH, bias = original": "output_SBH = original",
    "_strength), bias\n": "_strength)\n",
}
"""What the glue of a wrapped MLP becomes for a block of layers, which returns hidden states alone."""
LOOK_AT_FEATURES = ("tests/docs", "tests/test_structure.py", "tests/engine/inspection")
CLAIMS = "tests/features/test_claims.py"
"""It runs for the new features alone: the claims of the others take minutes, and nothing of them has changed."""
LEFT_OUT = (".git", ".venv", "build", "shared", "__pycache__", "*.egg-info", ".*_cache")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, whose modules win over the installed ones."""
    folder = tmp_path_factory.mktemp("copy") / "mindspeed"
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return folder


def run(checkout: Path, *command: str) -> str:
    """Run a command in the copy; its output is the message when it fails."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def make_feature(checkout: Path, name: str, kind: str) -> None:
    """Run the one command with the interpreter of this test, instead of an environment that ``make`` would install."""
    environment = ("-o", f"{sys.prefix}/installed", f"VENV={sys.prefix}")
    run(checkout, "make", *environment, "feature", f"NAME={name}", f"KIND={kind}")


def replace_in(file: Path, replacements: dict[str, str]) -> None:
    text = file.read_text(encoding="utf-8")
    for old, new in replacements.items():
        assert old in text
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_tree_is_green_after_one_command(checkout: Path) -> None:
    assert contract_for(TARGET, BASELINE) is None, "a feature patches this by now: name a function that none patches"
    run(checkout, sys.executable, "-m", "mindspeed", "features", "new", "new-patch")
    replace_in(checkout / "mindspeed/features/new_patch/feature.py", {WRAPPED: TARGET})
    replace_in(checkout / "mindspeed/features/new_patch/layers.py", GLUE)
    names = {kind: f"new-{kind}" for kind in KINDS}
    for kind, name in names.items():
        if kind != "patch":
            run(checkout, sys.executable, "-m", "mindspeed", "features", "new", name, "--kind", kind)
        write_texts(checkout / "mindspeed/features" / name.replace("-", "_"))
        make_feature(checkout, name, kind)
    drift = run(checkout, sys.executable, "-m", "mindspeed", "docs", "drift")
    (row,) = [line for line in drift.splitlines() if TARGET in line]
    cells = [cell.strip() for cell in row.split("|")[3:-1]]
    assert cells.count("not recorded") == len(recorded_releases()) - 1, "all releases but the installed one"
    of_all = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests/features").glob("test_*.py"))
    of_all.remove(CLAIMS)
    claims = [f"{CLAIMS}::test_a_feature_keeps_its_claim[{name}]" for name in names.values()]
    run(checkout, sys.executable, "-m", "pytest", "-q", "-m", "not long", *LOOK_AT_FEATURES, *of_all, *claims)
