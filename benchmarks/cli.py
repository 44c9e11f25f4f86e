"""What does the command line cost before it does anything? Whole processes against a bare interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.discovery import packages
from benchmarks.table import Row, Spent, main, medians, timed

COMMAND = "python -m benchmarks.cli"
LOADED = (
    "import sys; before = set(sys.modules); import mindspeed; "
    "names = {name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names) - {'mindspeed'}; "
    "print(len(names))"
)


ABSENT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron", "torch_npu"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
from mindspeed.cli import main
main()
"""
FEATURES = [
    *("tensor-parallel", "sequence-parallel", "pipeline-parallel", "virtual-pipeline", "data-parallel", "recompute"),
    *("distributed-optimizer", "async-ddp", "async-param-gather", "rms-norm", "swiglu"),
]
WORLD = (
    "--world-size 1024 --tp 8 --pp 8 --vpp 4 --num-layers 64 --hidden-size 8192 --num-attention-heads 64 --num-query-groups 8 "
    "--ffn-hidden-size 28672 --vocab-size 128256 --seq-length 8192 --micro-batch-size 1 --global-batch-size 1024 "
    "--num-experts 0 --normalization RMSNorm --activation silu --gated-linear-unit --platform npu --megatron 0.16.1"
)


def python(*arguments: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True, env=environment).stdout


def check_of_twenty() -> Spent:
    """The time of ``features check`` of 11 built-in features and 9 of other packages, for a world of 1,024 ranks."""
    names = [*FEATURES, *(f"made-{number}" for number in range(20 - len(FEATURES)))]
    with tempfile.TemporaryDirectory() as folder:
        made = str(packages(Path(folder) / "packages", 20 - len(FEATURES)))
        path = os.pathsep.join(filter(None, (made, os.environ.get("PYTHONPATH"))))
        command = ("-c", ABSENT, "features", "check", *names, *WORLD.split())
        assert "async-ddp" in python(*command, PYTHONPATH=path)
        (spent,) = medians(lambda: python(*command, PYTHONPATH=path), repeat=15)
    return spent


def rows() -> list[Row]:
    bare, imported, listed = medians(
        lambda: python("-c", "pass"),
        lambda: python("-c", "import mindspeed"),
        lambda: python("-m", "mindspeed", "features", "list"),
        repeat=15,
    )
    third_parties = int(python("-c", LOADED))
    return [
        Row("import mindspeed over bare Python", 10, (imported.cpu - bare.cpu) * 1e3, "ms", COMMAND),
        Row("third-party packages that import mindspeed loads", 0, third_parties, "", COMMAND),
        timed("features list, whole process", 0.2, listed, "s", COMMAND),
        timed(
            "features check, 20 features, 1,024 ranks, no torch and megatron, whole process",
            0.25,
            check_of_twenty(),
            "s",
            COMMAND,
        ),
    ]


if __name__ == "__main__":
    main(rows)
