"""What the built-in features set in Megatron exists there: names, values and patch targets."""

import subprocess
import sys
from typing import Any

import pytest
from megatron.core import __version__

from mindspeed.engine.inspection.megatron_copies import megatron_version
from mindspeed.engine.inspection.sites import find_site
from mindspeed.engine.planning.plan import PlannedOverride
from mindspeed.engine.resolution.environment import version_in
from mindspeed.megatron.argument_overrides import check_overrides
from mindspeed.plugins import ArgOverride, World, Wrap
from mindspeed.workbench.lint.upstream.rules import VALIDATIONS
from tests.features.resolving import CATALOG, overrides

EVERY_SETTING: dict[str, dict[str, Any]] = {
    "async-ddp": {"bucket_size": 1},
    "async-param-gather": {},
    "data-parallel": {"reduce_in_fp32": True},
    "distributed-optimizer": {},
    "expert-parallel": {"size": 2, "dispatcher": "allgather", "expert_tensor_size": 1},
    "pipeline-parallel": {"size": 2, "free_outputs": True},
    "recompute": {
        "granularity": "full",
        "method": "block",
        "num_layers": 1,
        "per_rank": True,
        "modules": None,
        "distribute": True,
    },
    "sequence-parallel": {},
    "swiglu": {},
    "tensor-parallel": {"size": 2},
    "virtual-pipeline": {"size": 2, "overlap_p2p": True},
}


@pytest.mark.parametrize("name", EVERY_SETTING)
def test_every_setting_exists_and_every_override_is_an_argument_of_megatron(name):
    assert EVERY_SETTING[name].keys() == CATALOG.feature(name).Args.model_fields.keys()
    wanted = [PlannedOverride((name,), ArgOverride(*item, "a test")) for item in overrides(name, **EVERY_SETTING[name]).items()]
    assert wanted
    assert check_overrides(wanted, megatron_version()) == []


def test_every_setting_has_a_description():
    for name, row in CATALOG.usable.items():
        for field_name, field in row.feature.Args.model_fields.items():
            assert field.description, f"{name}.{field_name}"


@pytest.mark.parametrize("name", sorted(CATALOG.usable))
def test_every_patch_target_exists_in_megatron(name):
    feature = CATALOG.feature(name)
    patches = feature(feature.Args(), World({})).patches() if "patches" in vars(feature) else []
    here = [
        patch for patch in patches if not (patch.when and patch.when.megatron) or version_in(__version__, patch.when.megatron)
    ]
    assert [patch.target for patch in here if find_site(patch.target) is None] == []


def test_wrappers_of_rules_are_called_without_torch():
    """Check executes Megatron's rules with them in a process that has no torch; otherwise no rule of a command is judged."""
    patches = [
        patch
        for row in CATALOG.usable.values()
        if "patches" in vars(row.feature)
        for patch in row.feature(row.feature.Args(), World({})).patches()
    ]
    wrappers = sorted({patch.value for patch in patches if isinstance(patch, Wrap) and patch.target in VALIDATIONS})
    assert wrappers
    call = "import sys; from pkgutil import resolve_name as found; sys.modules['torch'] = None"
    program = f"{call}\nfor name in {wrappers!r}: found(name)(lambda *_: None)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
