"""A package whose metadata cannot be read costs itself alone: every verb works."""

import os
import subprocess
import sys

import pytest

VERBS = [
    "--help",
    "features list rms",
    "features check rms-norm --platform cpu",
    "check -- pretrain_gpt.py --num-layers 2 --hidden-size 8 --num-attention-heads 1 --micro-batch-size 1 --seq-length 8",
    "docs rms-norm",
]


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_works_beside_metadata_that_is_no_text(verb, tmp_path):
    folder = tmp_path / "acme-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_bytes(b"Metadata-Version: 2.1\nName: ac\xff\xfeme\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_bytes(b"[mindspeed.features]\nb\xffx = acme:X\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "mindspeed", *verb.split()]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "MS901" not in done.stdout + done.stderr
    assert done.returncode in (0, 1)
