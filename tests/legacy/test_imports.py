"""The import statements of MindSpeed's consumers: they work, or they fail with what takes the place of the name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import mindspeed
from mindspeed.legacy.imports import OLD_MODULES, OldNameError, replacement

WORKING = [
    "import mindspeed.megatron_adaptor",
    "from mindspeed.megatron_adaptor import repatch",
    "from mindspeed.megatron_adaptor import get_mindspeed_args",
    "from mindspeed.patch_utils import MindSpeedPatchesManager",
    "from mindspeed.patch_utils import MindSpeedPatchesManager as aspm",
    "from mindspeed.features_manager.feature import MindSpeedFeature",
    "from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager",
    "from mindspeed.features_manager import FEATURES_LIST, create_features_list",
    "import mindspeed.args_utils",
    "from mindspeed.args_utils import get_mindspeed_args",
    "from mindspeed.args_utils import get_full_args as get_args",
    "from mindspeed.arguments import process_args",
    "from mindspeed.ops.npu_rotary_position_embedding import npu_rotary_position_embedding",
]
"""Statements of tier 1 and 2 whose names exist."""

LATER = {
    "from mindspeed.core.context_parallel.get_batch_utils import set_actual_seq_len": ("context-parallel", "eod-reset"),
    "from mindspeed.core.context_parallel.get_batch_utils import get_actual_seq_len": ("context-parallel", "eod-reset"),
    "from mindspeed.utils import set_position_ids": ("context-parallel", "eod-reset"),
    "from mindspeed.core.context_parallel.model_parallel_utils import get_ring_ranks_for_intra_window": (
        "context-parallel",
        "ring-attention",
        "hybrid-attention",
    ),
    "from mindspeed.core.context_parallel.model_parallel_utils import initialize_context_parallel_group_for_double_ring": (
        "context-parallel",
        "ring-attention",
        "hybrid-attention",
    ),
    "from mindspeed.core.context_parallel.adaptor import MindSpeedCPDotProductAttention": (
        "context-parallel",
        "flash-attention",
    ),
    "import mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention": (
        "context-parallel",
        "flash-attention",
    ),
    "from mindspeed.te.pytorch.fp8.reuse import clear_weight_quantization_reuse_cache": (),
    "from mindspeed.te.pytorch.fp8.reuse import set_weight_release_enabled": (),
    "from mindspeed.core.ssm.chunk_gated_delta_rule.chunk_gated_delta_rule import chunk_gated_delta_rule": (),
    "from mindspeed.ops.npu_moe_token_permute import npu_moe_token_permute": ("mindspeed.ops.npu_fused_moe_token_permute",),
    "from mindspeed.core.tensor_parallel.random import CheckpointWithoutOutput": ("activation-recompute", "norm-recompute"),
}
"""Statements of tier 1, and the most used of the others, of features that are not all built yet. Once they are, they work."""

PACKAGE = Path(mindspeed.__file__).parent


@pytest.mark.guards(9)
@pytest.mark.parametrize("statement", WORKING)
def test_a_statement_of_a_consumer_works_as_it_is_written(statement):
    exec(statement, {})


@pytest.mark.guards(9)
@pytest.mark.parametrize(("statement", "features"), LATER.items(), ids=LATER)
def test_a_statement_works_or_names_the_features_that_are_not_there_yet(statement, features):
    module = statement.split()[1]
    if (PACKAGE.parent / f"{module.replace('.', '/')}.py").exists():
        exec(statement, {})
        return
    with pytest.raises(ImportError) as caught:
        exec(statement, {})
    assert isinstance(caught.value, OldNameError)
    (problem,) = caught.value.problems
    assert (problem.code, problem.message) == ("MS112", f"{module} is an import name of MindSpeed that does not exist here")
    assert all(feature in problem.fix for feature in features)
    assert caught.value.name == module
    assert "mindspeed.core" not in sys.modules


def test_what_takes_the_place_of_a_name_is_said_for_features_that_exist_and_that_do_not():
    assert replacement("mindspeed.core.fusions.fused_rms_norm") == "--features rms-norm takes its place"
    assert replacement("mindspeed.fsdp") == "nothing takes its place yet"
    assert replacement("mindspeed.core.memory").startswith("--features recompute takes its place; adaptive-recompute and ")


def test_an_operator_that_does_not_exist_suggests_near_ones():
    with pytest.raises(OldNameError) as caught:
        importlib.import_module("mindspeed.ops.swiglus")
    assert caught.value.problems[0].fix == "did you mean mindspeed.ops.swiglu?"


def test_a_name_that_was_never_mindspeeds_is_an_ordinary_error():
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("mindspeed.plugnis")
    assert type(caught.value) is ModuleNotFoundError
    assert str(caught.value) == "No module named 'mindspeed.plugnis'"
    assert importlib.util.find_spec("mindspeed.plugnis") is None


def test_every_feature_in_the_table_is_one_that_has_old_flags_or_exists():
    from mindspeed.legacy.flags import OLD_FLAGS
    from mindspeed.registry import catalog

    flagged = {name for old in OLD_FLAGS for name in old.features}
    named = {name for names in OLD_MODULES.values() if not isinstance(names, str) for name in names}
    without_flags = {"matmul-add", "shared-attention-mask", "moe-grouped-gemm"}
    assert named - flagged - catalog().usable.keys() - without_flags == set()


def test_importing_mindspeed_does_not_import_the_old_names_and_these_import_neither_torch_nor_megatron():
    code = (
        "import sys, mindspeed\n"
        "print(sorted(name for name in sys.modules if name.startswith('mindspeed')))\n"
        "import mindspeed.features_manager.feature, mindspeed.patch_utils, mindspeed.args_utils, mindspeed.arguments\n"
        "mindspeed.args_utils.get_mindspeed_args()\n"
        "print({'torch', 'megatron'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['mindspeed', 'mindspeed._version']\nset()\n"
