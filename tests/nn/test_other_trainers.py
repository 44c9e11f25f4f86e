"""Examples with trainers and models of other packages, against the same loop with their own attention on one process.

MINDSPEED_TRAINERS names a folder with the packages of trainers.txt, where they are not installed; make test-trainers does it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed.nn import Attention, transformers_attention
from mindspeed.ops.errors import OperatorError

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
FOLDER: Final = os.environ.get("MINDSPEED_TRAINERS", "")
PLAIN: Final = {"hugging_face_trainer": ["--attention", "sdpa"], "torchtitan_model": ["--attention", "sdpa"]}
"""Arguments with which an example computes attention as its package does."""


def losses(example: str, nproc: int, *words: str) -> list[float]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    search = [str(EXAMPLES.parent), *([str(Path(FOLDER).resolve())] if FOLDER else [])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*launcher, str(EXAMPLES / f"{example}.py"), *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step ")]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("example", "packages"),
    [
        ("hugging_face_trainer", ["transformers", "accelerate"]),
        ("accelerate_trainer", ["accelerate"]),
        ("torchtitan_model", ["torchtitan"]),
    ],
)
def test_an_example_on_two_processes_has_the_losses_of_one(example: str, packages: list[str]) -> None:
    missing = [name for name in packages if not (Path(FOLDER) / name).is_dir() and importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed; make test-trainers installs it")
    plain = losses(example, 1, *PLAIN.get(example, ()))
    assert len(plain) == 3
    assert plain[-1] < plain[0]
    assert losses(example, 2) == pytest.approx(plain, rel=1e-5)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, heads, 8, 16, generator=generator) for heads in (4, 2, 2)]


def test_attention_has_the_interface_of_transformers() -> None:
    query, key, value = tensors()
    output, weights = transformers_attention(Attention())(nn.Module(), query, key, value, None, scaling=0.25, dropout=0.0)
    assert weights is None
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(output, expected.transpose(1, 2))


@pytest.mark.parametrize(
    ("requested", "text"),
    [
        ({"dropout": 0.1}, "the model requests dropout=0.1, but the module has 0.0"),
        ({"scaling": 1.0}, "the model requests scale=1.0, but the module has 0.25"),
        ({"sliding_window": 4}, "the model requests window=4, but the module has None"),
        ({"is_causal": False}, "the model requests causal=False, but the module has True"),
        ({"softcap": 30.0}, "the model requests softcap=30.0, but the module has None"),
        ({"attention_mask": torch.ones(2, 8)}, "the batch has an attention mask"),
    ],
)
def test_attention_that_the_module_does_not_compute_is_refused(requested: dict[str, Any], text: str) -> None:
    with pytest.raises(OperatorError, match=text):
        transformers_attention(Attention())(nn.Module(), *tensors(), **requested)


def test_dropout_follows_the_mode_of_the_model() -> None:
    module, attend = nn.Module(), transformers_attention(Attention(dropout=0.5))
    query, key, value = tensors()
    evaluated = attend(module.eval(), query, key, value, dropout=0.0)[0]
    torch.testing.assert_close(evaluated, Attention().forward(*(x.transpose(1, 2) for x in (query, key, value))))
    assert not torch.equal(attend(module.train(), query, key, value, dropout=0.5)[0], evaluated)
