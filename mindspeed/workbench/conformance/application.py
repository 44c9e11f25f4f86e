"""Checks that need a separate process: importing a feature without torch and megatron, applying its plan and undoing it.

``python -m mindspeed.workbench.conformance.application NAME...`` applies, prints one JSON array of outcomes, and
compares object identities of every entry of the patched packages' modules and classes.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any, Final

from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.workbench.conformance.outcome import Outcome, judged
from mindspeed.workbench.conformance.subjects import Subject, subjects

CHECKS = ("reversible", "idempotent")
HEAVY: Final = ("torch", "torch_npu", "megatron", "transformer_engine", "triton", "apex", "flash_attn")
LIMIT: Final = 200.0
"""Milliseconds of CPU time that importing one feature may take, beside what mindspeed itself imports."""

_PROGRAM: Final = """
import importlib, json, sys, time
heavy, *references = json.loads(sys.argv[1])
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            raise ImportError(f"it imports {name}; do that inside the method that needs it")
sys.meta_path.insert(0, Block())
import mindspeed.plugins.api, mindspeed.registry
answers = []
for reference in references:
    start = time.process_time()
    try:
        importlib.import_module(reference.partition(":")[0])
        error = ""
    except Exception as raised:  # a plugin may fail in any way, and the others are judged all the same
        error = str(raised) or type(raised).__name__
    answers.append([(time.process_time() - start) * 1e3, error])
print(json.dumps(answers))
"""


def application(tested: Sequence[Subject]) -> list[Outcome]:
    """``reversible`` and ``idempotent`` of each feature."""
    missing = [name for name in ("torch", "megatron") if find_spec(name) is None]
    names = [subject.name for subject in tested if subject.plan is not None]
    why = f"{' and '.join(missing)} not installed" if missing else "no job is suitable for the feature"
    skipped = [s.name for s in tested if missing or s.plan is None]
    outcomes = [Outcome(name, check, "not run", why) for name in skipped for check in CHECKS]
    if missing or not names:
        return outcomes
    done = _run_python("-m", "mindspeed.workbench.conformance.application", *names)
    if done.returncode != 0:
        tail = tuple(done.stderr.strip().splitlines()[-4:])
        text = f"the process ended with status {done.returncode}"
        return outcomes + [Outcome(name, check, "failed", text, tail) for name in names for check in CHECKS]
    rows = json.loads(done.stdout.splitlines()[-1])
    return outcomes + [Outcome(**row | {"details": tuple(row["details"])}) for row in rows]


def import_cost(tested: Sequence[Subject]) -> list[Outcome]:
    """Judge the import of each feature: nothing heavy is imported, and the CPU time that it takes."""
    done = _run_python("-c", _PROGRAM, json.dumps([HEAVY, *(subject.row.reference for subject in tested)]))
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        return [Outcome(s.name, "import cost", "failed", "the process ended", tuple(last)) for s in tested]
    outcomes = []
    for subject, (milliseconds, error) in zip(tested, json.loads(done.stdout.splitlines()[-1]), strict=True):
        slow = f"{milliseconds:.0f} ms, but only {LIMIT:.0f} ms is allowed" if milliseconds > LIMIT else ""
        fine = f"{milliseconds:.0f} ms, and neither torch nor megatron is imported"
        outcomes.append(judged(subject.name, "import cost", [text for text in (error or slow,) if text], fine))
    return outcomes


def _run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)


def main() -> None:
    outcomes = [outcome for name in sys.argv[1:] for subject in subjects(name) for outcome in _apply(subject)]
    print(json.dumps(list(map(asdict, outcomes))))


def _apply(subject: Subject) -> Iterator[Outcome]:
    from mindspeed import registry

    if subject.plan is None:
        raise RuntimeError(f"no plan for {subject.name}")
    sites = [planned for planned in subject.plan.patches if not planned.skipped]
    own = [planned for planned in sites if planned.owner == subject.name or planned.site.startswith("megatron.")]
    targets = [planned.site.partition(":")[0] for planned in own]
    os.environ.update(registry.process_variables(subject.plan))
    registry.activate(subject.plan)  # once before the first look: the platform is in place while Megatron is imported
    for name in targets:
        with suppress(ImportError):  # a part of Megatron that cannot be imported here is not patched either
            importlib.import_module(name)
    registry.deactivate()
    # of mindspeed itself, which counts activations, the modules with targets alone
    packages = {"megatron", *(name if name.startswith("mindspeed.") else name.partition(".")[0] for name in targets)}
    before = _identities(packages)
    registry.activate(subject.plan)
    active = _identities(packages)
    registry.activate(subject.plan)
    again = _identities(packages)
    registry.deactivate()
    after = _identities(packages)
    changed = set(_differences(before, active))
    wrong = [f"not restored: {name}" for name in _differences(before, after)]
    wrong += [f"applying {p.patch.target} had no effect" for p in own if p.owner == subject.name and not _names(p) & changed]
    fine = f"after applying and undoing, {len(after)} modules, classes and functions are identical"
    yield judged(subject.name, "reversible", wrong, fine)
    doubled = [f"changed by a second activation: {name}" for name in _differences(active, again)]
    yield judged(subject.name, "idempotent", doubled, "a second activation changes nothing")


def _names(planned: PlannedPatch) -> set[str]:
    """The holders that a patch of a site changes: its module, and the class that a member belongs to."""
    module, _, path = planned.site.partition(":")
    return {module, f"{module}:{path.partition('.')[0]}"}


Identities = dict[str, tuple[Any, list[tuple[str, Any]]]]


def _identities(packages: set[str]) -> Identities:
    """Every module, class and function of the packages by name, with its entries, which are kept alive."""
    found: Identities = {}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or not any(f"{name}.".startswith(f"{package}.") for package in packages):
            continue
        entries = [(key, value) for key, value in vars(module).items() if not isinstance(value, ModuleType)]
        found[name] = (module, entries)
        for key, value in entries:
            if isinstance(value, type) and value.__module__ == name:
                members = [(k, v) for k, v in vars(value).items() if k not in ("__abstractmethods__", "_abc_impl", "__doc__")]
                found[f"{name}:{key}"] = (value, [*members, *((f"base {i}", base) for i, base in enumerate(value.__bases__))])
            elif isinstance(value, FunctionType) and value.__module__ == name:
                found[f"{name}:{key}"] = (value, [("__code__", value.__code__), *vars(value).items()])
    return found


def _differences(before: Identities, after: Identities) -> list[str]:
    """Names whose object or entries differ; modules imported in between are not looked at."""

    def state(name: str, found: Identities) -> tuple[int, list[tuple[str, int]]]:
        holder, entries = found.get(name, (None, []))
        return id(holder), [(key, id(value)) for key, value in entries]

    return [name for name in before if state(name, before) != state(name, after)]


if __name__ == "__main__":
    main()
