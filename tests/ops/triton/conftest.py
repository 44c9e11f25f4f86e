"""The tests of this folder need triton and a process of their own: `make test-triton`.

With TRITON_INTERPRET=1 the kernels run on the CPU. Without it they are compiled for a GPU, which need not be there.
"""

import os
from importlib.util import find_spec
from pathlib import Path

_COMPILED = ("test_compilation.py",)
_FOUND = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    name = collection_path.name
    if not name.startswith("test_"):
        return None
    if name == "test_elsewhere.py":
        return _FOUND or None
    return None if _FOUND and (name in _COMPILED) != _INTERPRETED else True
