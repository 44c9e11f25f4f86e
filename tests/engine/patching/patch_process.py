"""A process that imports the fake megatron with patches: applied before or after and undone, kept, or never.

``python -m tests.engine.patching.patch_process before|after|kept|never`` prints the state of its modules.
"""

import hashlib
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

MODULES = (
    "megatron.core.transformer.layer",
    "megatron.core.lazy",
    "megatron.core.circular_b",
    "fakelib",
    "glue",
    "layers",
)


def described(when: str) -> dict[str, Any]:
    """The state of all modules in a new process: every object described, and numbered where it is met again."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.patching.patch_process", when],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parents[3],
    )
    state: dict[str, Any] = json.loads(done.stdout)
    return state


def main(when: str) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fake_megatron"))
    if when == "before":
        undo = _patch()
    for name in MODULES:
        importlib.import_module(name)
    if when in ("after", "kept"):
        undo = _patch()
    if when in ("before", "after"):
        undo()
    numbers: dict[int, int] = {}
    names = sorted(name for name in sys.modules if name.partition(".")[0] in ("megatron", "fakelib", "glue", "layers"))
    print(json.dumps({name: _describe(sys.modules[name], numbers, top=True) for name in names}))


def _patch() -> Any:
    from tests.engine.patching.patch_cases import ATTENTION, STATE, applied, mixin, put, replace, wrap

    return applied(
        replace(f"{STATE}:get_size", "glue:size_of_42"),
        wrap(f"{STATE}:scale"),
        wrap("megatron.core.circular_a:early"),
        replace(f"{ATTENTION}:Attention", "layers:RingAttention"),
        mixin(f"{ATTENTION}:Base"),
        wrap(f"{ATTENTION}:Base.shape"),
        wrap(f"{ATTENTION}:SelfAttention.inherited"),
        put(f"{STATE}:HAVE_FAST", True),
        replace("megatron.core.jit:jit", "glue:other_compiler"),
        wrap("fakelib:helper"),
    ).undo


def _describe(value: Any, numbers: dict[int, int], top: bool = False) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if id(value) in numbers:
        return f"object {numbers[id(value)]}"
    if isinstance(value, ModuleType) and not top:
        return f"module {value.__name__}"
    if isinstance(value, CodeType):
        return hashlib.sha1(value.co_code).hexdigest()
    numbers[id(value)] = len(numbers)
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__qualname__", "")
    head = f"object {numbers[id(value)]}: {type(value).__name__} {name}"
    if isinstance(value, list | tuple):
        return [head, *(_describe(part, numbers) for part in value)]
    if isinstance(value, dict):
        return [head, *([_describe(key, numbers), _describe(inner, numbers)] for key, inner in value.items())]
    if isinstance(value, set | frozenset):
        return [head, sorted(part.__qualname__ for part in value)]
    parts = [
        None if isinstance(value, ModuleType) else getattr(value, name, None)
        for name in ("__bases__", "__code__", "__defaults__", "__kwdefaults__", "__func__")
    ]
    skipped = ("__builtins__", "__loader__", "__spec__", "__weakref__", "__dict__", "__cached__")
    # which submodule was imported first is no state of the modules
    entries = {k: v for k, v in vars(value).items() if k not in skipped} if hasattr(value, "__dict__") else {}
    modules = sorted(key for key, inner in entries.items() if isinstance(inner, ModuleType))
    rest = [[key, _describe(inner, numbers)] for key, inner in entries.items() if key not in modules]
    return [head, modules, [_describe(part, numbers) for part in parts], rest]


if __name__ == "__main__":
    main(sys.argv[1])
