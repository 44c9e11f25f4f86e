"""The largest requests: thirty orders give one plan each, and they leave nothing behind."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed.workbench.verification.matrix.cases import MatrixCase
from tests.workbench.verification.matrix.largest_sets import largest_set

SEEDS = (0, 1, 2)
ORDERS = 10


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_a_large_request_does_not_change_its_plan(seed: int) -> None:
    features = list(largest_set(seed))
    chance = random.Random(seed)
    digests = set[str]()
    for _ in range(ORDERS):
        chance.shuffle(features)
        digests.add(MatrixCase(tuple(features), given={"dtype": "bf16"}).build().plan.digest)
    assert len(digests) == 1


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_a_large_set_leaves_nothing_in_torch_and_megatron(seed: int) -> None:
    words = [sys.executable, "-W", "ignore", "-m", "tests.workbench.verification.matrix.largest_sets", *largest_set(seed)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[4])
    assert "RESULT" in done.stdout, done.stderr[-2000:]
    assert json.loads(done.stdout.partition("RESULT")[2]) == []
