"""``mindspeed pretrain`` on short documents that do not see one another: every stage and rank reads where they end."""

import random
import shutil
from pathlib import Path

import pytest

from mindspeed.workbench.training.checkpoints import checkpoint_path
from mindspeed.workbench.training.corpus import prepare
from tests.workbench.training.conftest import TINY, WORDS, Run, losses

pytestmark = pytest.mark.long
FEATURE = ("--features", "eod-reset")
RING = ("--features", "ring-attention", "--cp=2")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prefix of prepared data: some thousand documents, of one word each up to more than a sequence."""
    folder, words = tmp_path_factory.mktemp("documents"), random.Random(0)
    for number in range(1500):
        (folder / f"{number:04}.txt").write_text(" ".join(words.choices(WORDS, k=words.randint(1, 9))))
    prepare([str(folder)], str(folder.parent / "prepared"))
    return str(folder.parent / "prepared")


def trained(run: Path, *more: str) -> dict[int, float]:
    Run(*more, f"--run={run}").done()
    return losses(run)


def test_every_layout_reads_the_ends_of_documents(tmp_path: Path, documents: str) -> None:
    """Stages draw their weights otherwise than one process does, so all go on from one checkpoint."""
    whole, data = tmp_path / "whole", (*TINY, f"--data={documents}", "--train-iters=5", "--save-interval=1", "--keep=9")
    alone = trained(whole, *data, *FEATURE)
    assert trained(tmp_path / "plain", *data) != pytest.approx(alone, rel=1e-4), "the documents are seen apart"
    for step in (2, 3, 4, 5):
        shutil.rmtree(checkpoint_path(whole, step))
    for name, layout in {
        "ring": (*RING, "--nproc=2"),
        "stages": ("--pp=4", "--nproc=4"),
        "interleaved": ("--pp=2", "--vpp=2", "--nproc=2"),
        "ring and stages": (*RING, "--pp=2", "--nproc=4"),
        "tensor": ("--tp=2", "--features", "sequence-parallel", "--nproc=2"),
    }.items():
        found = trained(tmp_path / name, f"--resume={whole}", *layout)
        assert found == pytest.approx({step: alone[step] for step in (2, 3, 4, 5)}, rel=1e-5), name
