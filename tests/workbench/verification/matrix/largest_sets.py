"""Large sets of features that resolve. As a script: activate and deactivate each of these, and print what is left."""

import json
import os
import random
import sys

from mindspeed import registry
from mindspeed.workbench.verification.matrix.cases import MatrixCase, resolves
from tests.engine.patching.process_snapshots import differences, identities, import_models


def largest_set(seed: int) -> tuple[str, ...]:
    """A set of features that resolves, to which no feature can be added; which one depends on the seed."""
    names = sorted(registry.catalog().usable)
    random.Random(seed).shuffle(names)
    made: list[str] = []
    for name in names:
        if resolves([*made, name]):
            made.append(name)
    return tuple(made)


def what_is_left(features: tuple[str, ...]) -> list[str]:
    """Entries of torch and Megatron that differ after a plan was active, the second time: by then all is imported."""
    plan = MatrixCase(features).build().plan
    found: list[str] = []
    with_variables = dict(os.environ)
    for _ in range(2):
        os.environ.update(registry.process_variables(plan))
        before = identities()
        registry.activate(plan)
        if not differences(before, identities()):
            raise RuntimeError("activation changed nothing")
        registry.deactivate()
        found = differences(before, identities())
        os.environ.clear()
        os.environ.update(with_variables)
    return found


if __name__ == "__main__":
    platform = registry.plan(platform="cpu", level=0)
    registry.activate(platform)  # the emulation of a device is in place while Megatron is imported
    import_models()
    registry.deactivate()
    print("RESULT" + json.dumps(what_is_left(tuple(sys.argv[1:]))))
