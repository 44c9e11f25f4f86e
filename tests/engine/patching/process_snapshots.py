"""What a process looks like: every entry of every torch and megatron module and class dictionary, and every function.

`identities` compares two moments of one process by object identity; `descriptions` compares two processes by what
the objects are. Run as a script it prints the verdict of one scenario.
"""

import importlib
import json
import sys
import types
from collections.abc import Iterator
from typing import Any

PACKAGES = ("torch", "megatron")
MODEL_MODULES = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.dist_checkpointing",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.transformer.moe.token_dispatcher",
)
VOLATILE = {
    *("__builtins__", "__cached__", "__spec__", "__loader__", "__abstractmethods__", "_abc_impl", "__doc__"),
    *("_torchdynamo_wrapper_id", "_autograd_function_id"),  # counters of the process
    *("REGISTRY_KEY", "STATE_KEY"),  # random
    "_queued_calls",  # stack traces of the import
    "_dir",  # registered operator namespaces, ours among them, which torch never takes back
}
FEATURES = ["pipeline-parallel", "rms-norm", "swiglu", "sequence-parallel", "recompute"]
WORLD = {"tp": 2, "pp": 2}


def modules() -> dict[str, types.ModuleType]:
    return {
        name: module
        for name, module in sorted(sys.modules.items())  # a class is named by the first module that has it
        if isinstance(module, types.ModuleType) and name.partition(".")[0] in PACKAGES
    }


def holders() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """``(name, holder, dictionary)`` of every module, every class and every function defined in the packages."""
    seen: set[int] = set()
    for name, module in modules().items():
        entries = dict(types.ModuleType.__getattribute__(module, "__dict__"))
        yield name, module, entries
        stack = [(f"{name}:{key}", value) for key, value in entries.items()]
        while stack:
            path, value = stack.pop()
            if id(value) in seen:
                continue
            if isinstance(value, type) and value.__module__.partition(".")[0] in PACKAGES:
                seen.add(id(value))
                members = dict(vars(value))
                yield path, value, {**members, "__bases__": value.__bases__}
                stack += [(f"{path}.{key}", getattr(member, "__func__", member)) for key, member in members.items()]
            elif isinstance(value, types.FunctionType) and str(value.__module__).partition(".")[0] in PACKAGES:
                seen.add(id(value))
                yield (
                    path,
                    value,
                    {
                        "__code__": value.__code__,
                        "__defaults__": value.__defaults__,
                        "__kwdefaults__": value.__kwdefaults__,
                        **vars(value),
                    },
                )


def identities() -> dict[int, tuple[str, Any, list[tuple[str, Any]]]]:
    """Every holder by its id, with its entries in order; keeps all objects alive, so that ids stay comparable."""
    taken = {id(holder): (name, holder, list(entries.items())) for name, holder, entries in holders()}
    taken[0] = ("sys.meta_path", sys.meta_path, [(str(index), finder) for index, finder in enumerate(sys.meta_path)])
    return taken


def differences(before: dict[int, Any], after: dict[int, Any]) -> list[str]:
    """Entries that are not the same objects in the same order, apart from submodules first imported meanwhile.

    One of those is ``torch.ops.mindspeed``, the namespace of registered operators, which torch never takes back.
    """
    found = []
    loaded = modules()
    for key, (name, _, entries) in before.items():
        if key not in after:
            found.append(f"{name} is gone")
            continue
        now = after[key][2]
        if name in loaded:
            old = {entry for entry, _ in entries}
            now = [(entry, value) for entry, value in now if entry in old or not isinstance(value, types.ModuleType)]
        if [(entry, id(_plain(value))) for entry, value in entries] != [(entry, id(_plain(value))) for entry, value in now]:
            keys = {entry for entry, _ in entries} ^ {entry for entry, _ in now}
            changed = [e for (e, v), (f, w) in zip(entries, now, strict=False) if e != f or _plain(v) is not _plain(w)]
            found.append(f"{name}: {sorted(keys) or changed[:5]}")
    return found


def _plain(value: Any) -> Any:
    """``__bases__`` and empty defaults are made anew or shared; compare what they hold."""
    return _bases.setdefault(value, value) if isinstance(value, tuple) and all(isinstance(v, type) for v in value) else value


_bases: dict[tuple[type, ...], tuple[type, ...]] = {}


def descriptions() -> dict[str, dict[str, str]]:
    """Every holder by name, with what each entry is, free of addresses."""
    return {
        name: {
            key: describe(value)
            for key, value in entries.items()
            if key not in VOLATILE and not isinstance(value, types.ModuleType)
        }
        for name, _, entries in holders()
    }


def describe(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return f"function {value.__module__}.{value.__qualname__} {value.__code__.co_firstlineno}"
    if isinstance(value, types.CodeType):
        return f"code {value.co_filename}:{value.co_firstlineno}"
    if isinstance(value, type):
        return f"class {value.__module__}.{value.__qualname__}"
    if isinstance(value, staticmethod | classmethod):
        return f"{type(value).__name__} {describe(value.__func__)}"
    if isinstance(value, tuple | list):
        parts = [describe(part) for part in value]
        made_of_a_set = all(type(part) is str for part in value)
        return f"{type(value).__name__} {sorted(parts) if made_of_a_set else parts}"
    if type(value) is int and value > 1 << 32:
        return "an address"
    if type(value) in (bool, int, float, str, type(None)):
        return repr(value)
    return f"instance of {type(value).__module__}.{type(value).__qualname__}"


def import_models() -> None:
    for name in MODEL_MODULES:
        importlib.import_module(name)


def twice_in_one_process() -> list[str]:
    """Activate and deactivate two times on loaded Megatron: the state before and after."""
    import mindspeed

    import_models()
    plan = mindspeed.plan(FEATURES, world=WORLD)
    found = []
    for _ in range(2):
        before = identities()
        mindspeed.activate(plan)
        assert differences(before, identities()), "activation changed nothing"
        mindspeed.deactivate()
        found += differences(before, identities())
    return found


def activated_first() -> dict[str, Any]:
    """Activate, import Megatron, deactivate: the loaded modules in order and the state."""
    import mindspeed

    mindspeed.activate(mindspeed.plan(FEATURES, world=WORLD))
    import_models()
    mindspeed.deactivate()
    return {"modules": list(modules()), "state": descriptions(), "meta_path": finders()}


def finders() -> int:
    """Finders of this process; without the last one of the package itself, which only explains old import names."""
    return sum(type(finder).__module__ != "mindspeed" for finder in sys.meta_path)


def fresh(names: list[str]) -> dict[str, Any]:
    """The same modules without us."""
    for name in names:
        importlib.import_module(name)
    return {"modules": list(modules()), "state": descriptions(), "meta_path": finders()}


if __name__ == "__main__":
    scenario = sys.argv[1]
    if scenario == "fresh":
        result: Any = fresh(json.load(sys.stdin))
    else:
        result = {"twice": twice_in_one_process, "activated": activated_first}[scenario]()
    print("RESULT" + json.dumps(result))
