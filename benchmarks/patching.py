"""What do patches cost? Applying them on a loaded Megatron, checking them before it is loaded, and each patched call."""

from __future__ import annotations

import functools
import importlib
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from types import FunctionType
from typing import Any

from benchmarks.table import Row, Spent, main, middle, repetitions, sized, timed
from mindspeed.engine.inspection import source
from mindspeed.engine.patching.apply import apply
from mindspeed.engine.planning.patch_checks import check_patches, with_sites
from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.plugins.patches import Mixin, Patch, Replace, Wrap

COMMAND = "python -m benchmarks.patching"
TREE = "megatron.core."
LOADED = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.dist_checkpointing",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.moe.moe_layer",
)


def divide(numerator: int, denominator: int) -> int:
    """Stands for ``megatron.core.utils.divide``; called plainly, and as its replacement."""
    return numerator // denominator


def passed_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that only calls the original."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return call


class Nothing:
    """A mixin that changes nothing."""


def planned(patch: Patch) -> PlannedPatch:
    return PlannedPatch("benchmark", patch, patch.target)


def real_targets(count: int) -> list[PlannedPatch]:
    """Patches of functions, methods and classes of the loaded megatron.core: two thirds, a quarter, the rest."""
    functions, methods, classes = [], [], []
    for name in sorted(name for name in sys.modules if name.startswith(TREE)):
        for key, value in vars(sys.modules[name]).items():
            if getattr(value, "__module__", None) != name or getattr(value, "__qualname__", None) != key:
                continue
            if isinstance(value, FunctionType):
                functions.append(planned(Wrap(f"{name}:{key}", "benchmarks.patching:passed_on", "measured")))
            elif isinstance(value, type) and isinstance(vars(value).get("forward"), FunctionType):
                methods.append(planned(Wrap(f"{name}:{key}.forward", "benchmarks.patching:passed_on", "measured")))
                if not value.__subclasses__():  # one mixin cannot stand before a class and its subclass
                    classes.append(planned(Mixin(f"{name}:{key}", "benchmarks.patching:Nothing", "measured")))
    plain = [patch for patch in classes if not check_patches([patch])]
    chosen = [*plain[: count // 12], *methods[: count // 4]]
    return [*functions[: count - len(chosen)], *chosen]


def spent_on(action: Callable[[], Any], after: Callable[[Any], None] = lambda _: None, repeat: int = 9) -> Spent:
    """Median time of an action, each time followed by ``after``, which is not measured."""
    spent = []
    for _ in range(repetitions(repeat)):
        start = Spent.now()
        result = action()
        spent.append(Spent.now().since(start))
        after(result)
    return middle(spent)


def more_per_call(*patches: Patch) -> float:
    """Nanoseconds that a patched ``megatron.core.utils.divide`` takes more than the plain function, measured in turns."""
    plain, patched = importlib.import_module("benchmarks.patching"), importlib.import_module("megatron.core.utils")
    active = apply([planned(patch) for patch in patches])
    differences, calls = [], sized(20_000, 10)
    for _ in range(repetitions(101)):
        before, after = (
            timeit.timeit("m.divide(64, 8)", timer=time.process_time, globals={"m": m}, number=calls) for m in (plain, patched)
        )
        differences.append((after - before) / calls * 1e9)
    active.undo()
    return statistics.median(differences)


ALIASES = "of which the search for aliases is two thirds"


def rows() -> list[Row]:
    import torch  # noqa: F401 - so that its import is in no measurement

    for name in LOADED:
        importlib.import_module(name)
    count = sized(300, 12)
    patches = with_sites(real_targets(count))
    assert len(patches) == count
    replaced = Replace("megatron.core.utils:divide", "benchmarks.patching:divide", "measured")
    wrapped = Wrap("megatron.core.utils:divide", "benchmarks.patching:passed_on", "measured")
    applied = spent_on(lambda: apply(patches), lambda active: active.undo())
    forget_sources()
    checked = spent_on(lambda: check_patches(patches), lambda _: forget_sources(), repeat=3)
    return [
        timed("apply 300 patches on loaded megatron", 30, applied, "ms", COMMAND, ALIASES),
        timed("check 300 patches, sources not read before", 1000, checked, "ms", COMMAND),
        Row("a replaced function, more per call", 1, more_per_call(replaced), "ns", COMMAND, "0 within the noise of 1 ns"),
        Row("a wrapped function, more per call", 150, more_per_call(replaced, wrapped), "ns", COMMAND),
    ]


def forget_sources() -> None:
    """Check as a new process does."""
    source._tables.clear()
    source._found.clear()


if __name__ == "__main__":
    main(rows)
