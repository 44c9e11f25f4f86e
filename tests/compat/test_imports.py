"""The import statements of MindSpeed's consumers: they work, or they fail with what takes the place of the name."""

import importlib.util
import os
import pickle
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mindspeed
from mindspeed.compat.imports import OldNameError
from mindspeed.compat.moved import MOVED
from mindspeed.compat.old_modules import OLD_MODULES, replacement
from mindspeed.engine.inspection.sites import find_site
from mindspeed.engine.inspection.source import find_module
from tests.compat import consumers

CHECKOUTS = [path for path in os.environ.get("MINDSPEED_CONSUMERS", "").split(os.pathsep) if path]
"""Checkouts of MindSpeed-LLM, ms-swift, verl or others."""

INTERFACE = (
    "args_utils",
    "arguments",
    "features_manager.feature",
    "features_manager.features_manager",
    "megatron_adaptor",
    "patch_utils",
)
"""Modules through which consumers adapt Megatron."""

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
    "from mindspeed.patch_utils import MindSpeedPatchesManager, Patch, is_megatron_training_available",
    "from mindspeed.features_manager import MindSpeedFeature, FusedSwigluFeature, VirtualOptimizerFeature",
    "from mindspeed.features_manager.fusions.fused_bias_swiglu import FusedSwigluFeature",
    "from mindspeed.features_manager.pipeline_parallel import NoopLayersFeature",
    "from mindspeed.deprecate import AutoExecuteFunction, NoExecuteFunction",
    "from mindspeed.op_builder import RingAttentionUpdateOpBuilder, GMMOpBuilder",
    "from mindspeed.ops.gmm import npu_gmm, npu_gmm_v2",
    "from mindspeed.ops.ffn import npu_ffn",
    "from mindspeed.ops import ffn; ffn.npu_ffn",
    "from mindspeed.ops import quant_gmm; quant_gmm.npu_quant_gmm, quant_gmm.npu_quant_gmm_v2",
    "from mindspeed.ops.quant_gmm import npu_quant_gmm",
    "from mindspeed.ops.npu_all_to_all_all_gather_bmm import npu_alltoall_allgather_bmm",
    "from mindspeed.ops.npu_bmm_reduce_scatter_all_to_all import npu_bmm_reducescatter_alltoall",
    "from mindspeed.ops.fusion_attention_v2 import npu_fusion_attention, npu_fusion_attention_grad",
    "from mindspeed.ops.npu_matmul_add import npu_matmul_add_fp32",
    "from mindspeed.ops.npu_groupmatmul_add import npu_groupmatmul_add_fp32",
    "from mindspeed.ops.npu_moe_token_permute import npu_moe_token_permute",
    "from mindspeed.ops.npu_moe_token_unpermute import npu_moe_token_unpermute",
]
"""Statements of consumers that work."""

REPLACED = {
    "from mindspeed.core.context_parallel.get_batch_utils import set_actual_seq_len": (
        "mindspeed.core.context_parallel.get_batch_utils",
        "remove the import and its calls, because context-parallel already splits every batch, and eod-reset already reads "
        "the ends of documents from every batch",
    ),
    "from mindspeed.core.context_parallel.adaptor import MindSpeedCPDotProductAttention": (
        "mindspeed.core.context_parallel.adaptor",
        "remove this import, which needs no replacement; the context-parallel features, such as ring-attention, patch "
        "Megatron's core attention themselves",
    ),
    "import mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention": (
        "mindspeed.te.pytorch.attention.dot_product_attention.dot_product_attention",
        "use Megatron's core attention, which the features context-parallel and flash-attention change",
    ),
    "from mindspeed.core.ssm.chunk_gated_delta_rule import chunk_gated_delta_rule": (
        "mindspeed.core.ssm.chunk_gated_delta_rule",
        "remove this import, because this package has no replacement for it",
    ),
    "from mindspeed.core.fusions.fused_rms_norm import RMSNorm": (
        "mindspeed.core.fusions.fused_rms_norm",
        "--features rms-norm, or mindspeed.ops.rms_norm",
    ),
    "from mindspeed.core.memory.reuse_param.adaptor import reuse_fp32_param_init_wrapper": (
        "mindspeed.core.memory.reuse_param.adaptor",
        "use --features reuse-fp32-param instead",
    ),
    "from mindspeed.arguments import parse_args_wrapper": (
        "parse_args_wrapper of mindspeed.arguments",
        "import only process_args from mindspeed.arguments; use Megatron-LM's parser for all other arguments",
    ),
    "from mindspeed.features_manager import NothingFeature": (
        "NothingFeature of mindspeed.features_manager",
        "import only classes of MindSpeed's features from here, and check the spelling of the name. If no class has this "
        "name, remove the import; mindspeed features list shows the features to use instead",
    ),
    "from mindspeed.op_builder import AlgorithmOpBuilder": (
        "AlgorithmOpBuilder of mindspeed.op_builder",
        "remove the builder: the feature reuse-fp32-param needs no C++ library",
    ),
    "from mindspeed.ops import npu_swiglu": ("npu_swiglu of mindspeed.ops", "did you mean mindspeed.ops.swiglu?"),
}
"""Statements that fail, with the words that they fail with."""

TRIED = """
import contextlib, io, sys
from mindspeed.compat.imports import OldNameError
from mindspeed.compat.moved import MOVED
from tests.compat import consumers

names = consumers.read(*map(consumers.Path, sys.argv[1:])) if sys.argv[1:] else consumers.recorded()
sys.argv[1:] = []
for statement in consumers.statements(names):
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            exec(statement, {})
    except OldNameError:
        continue
    except BaseException as error:
        print(f"{statement}: {type(error).__name__}: {error}")
"""


def tried(*checkouts):
    """What the import statements of a process without any plan end in, apart from working and MS112."""
    env = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "MINDSPEED_PLATFORM": "cpu", "MINDSPEED_REPORT": ""}
    command = [sys.executable, "-W", "ignore", "-c", TRIED, *checkouts]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout


PACKAGE = Path(mindspeed.__file__).parent


@pytest.mark.guards(9)
@pytest.mark.parametrize("statement", WORKING)
def test_a_statement_of_a_consumer_works_as_it_is_written(statement):
    exec(statement, {})


@pytest.mark.guards(9)
@pytest.mark.parametrize("statement", REPLACED)
def test_a_name_that_is_not_there_says_what_does_its_work(statement):
    with pytest.raises(OldNameError) as caught:
        exec(statement, {})
    (problem,) = caught.value.problems
    name, fix = REPLACED[statement]
    assert problem.code == "MS112"
    assert (problem.message, problem.fix_text) == (
        f"{name} is a name of Ascend's original MindSpeed that this package does not provide",
        fix,
    )
    assert caught.value.name == statement.split()[1]


@pytest.mark.guards(9)
def test_every_recorded_name_of_a_consumer_is_found_or_explained():
    from mindspeed.compat import imports

    for module, taken in consumers.recorded().items():
        file = PACKAGE.parent / module.replace(".", "/")
        if file.is_dir() or file.with_suffix(".py").exists():
            continue  # a module of this package: the statements that work are above, the long test tries every name
        provided = imports.PROVIDED.get(module, {})
        for name in taken:
            if name in provided:
                assert find_site(provided[name]) if ":" in provided[name] else find_module(provided[name]), (module, name)
            elif name not in imports._names(module) and f"{module}.{name}" not in imports.PROVIDED:
                with pytest.raises(OldNameError):
                    exec(f"from {module} import {name}", {})


@pytest.mark.long
def test_no_import_statement_of_a_consumer_ends_in_a_bare_error():
    assert tried() == ""


@pytest.mark.long
@pytest.mark.skipif(not CHECKOUTS, reason="MINDSPEED_CONSUMERS names no checkouts")
def test_no_import_statement_of_the_checkouts_ends_in_a_bare_error():
    assert tried(*CHECKOUTS) == ""


def test_a_name_that_is_taken_as_an_attribute_is_an_ordinary_error():
    import mindspeed.core.ssm.gated_delta_net as old

    assert getattr(old, "chunk_gated_delta_rule", None) is None
    assert callable(old.tensor_a2a_cp2hp)
    assert dir(old)[-2:] == ["tensor_a2a_cp2hp", "tensor_a2a_hp2cp"]


@pytest.mark.parametrize("module", [*INTERFACE, "features_manager", "core.ssm.gated_delta_net"])
def test_a_search_through_all_modules_passes_over_the_old_names(module):
    assert not hasattr(importlib.import_module(f"mindspeed.{module}"), "nowhere")
    without_module = type("WithoutModule", (), {"__reduce__": lambda self: "nowhere", "__module__": None})()
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(without_module)


@pytest.mark.parametrize("module", INTERFACE)
def test_a_name_that_one_of_them_lacks_is_told_when_it_is_imported(module):
    with pytest.raises(OldNameError) as caught:
        exec(f"from mindspeed.{module} import nowhere", {})
    (problem,) = caught.value.problems
    assert problem.message == (
        f"nowhere of mindspeed.{module} is a name of Ascend's original MindSpeed that this package does not provide"
    )


def test_an_old_name_works_where_an_update_has_left_a_folder_with_bytecode(tmp_path):
    (tmp_path / "features_manager" / "__pycache__").mkdir(parents=True)
    code = "import sys, mindspeed; mindspeed.__path__.append(sys.argv[1]); from mindspeed.features_manager import FEATURES_LIST"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_module_that_was_renamed_works_with_a_warning_that_names_the_new_one():
    from mindspeed.workbench.conformance.testing import conformance

    sys.modules.pop("mindspeed.plugins.testing", None)
    with pytest.warns(FutureWarning, match=r"^mindspeed\.plugins\.testing is mindspeed\.conformance\.testing now$"):
        exec("from mindspeed.plugins.testing import conformance", names := {})
    assert names["conformance"] is conformance


def test_a_consumer_writes_the_namespace_of_arguments():
    code = (
        "import sys, mindspeed.args_utils\n"
        "before = mindspeed.args_utils._MINDSPEED_ARGS\n"
        "mindspeed.args_utils._MINDSPEED_ARGS = 'theirs'\n"
        "print(before, mindspeed.args_utils.get_mindspeed_args())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None theirs\n"


def test_every_replacement_names_features_and_operators_that_exist():
    from mindspeed.ops import ALIASES, OPERATORS
    from mindspeed.registry import catalog

    known = catalog().usable.keys()
    for module, features in OLD_MODULES.items():
        assert isinstance(features, str) or set(features) <= known, module
    texts = " ".join(replacement(module) for module in OLD_MODULES)
    assert set(re.findall(r"--features ([a-z0-9-]+)", texts)) <= known
    assert set(re.findall(r"mindspeed\.ops\.(\w+)", texts)) <= {*OPERATORS, *ALIASES}
    own = re.findall(r"(mindspeed\.(?:context_parallel|plugins)[a-z_.]*)\b", texts)
    assert [name for name in own if not find_module(name)] == []


def test_what_does_the_work_of_a_module_is_said_for_one_feature_and_for_several():
    assert replacement("mindspeed.core.tensor_parallel.mc2_feature") == "use --features mc2 instead"
    assert replacement("mindspeed.core.pipeline_parallel.ripipe_schedules") == (
        "use the features recompute-in-bubble and recompute-in-advance instead"
    )
    assert replacement("mindspeed.core.qat") == "remove this import, because this package has no replacement for it"


def test_an_operator_that_does_not_exist_suggests_near_ones():
    with pytest.raises(OldNameError) as caught:
        importlib.import_module("mindspeed.ops.swiglus")
    assert caught.value.problems[0].fix_text == "did you mean mindspeed.ops.swiglu?"


def test_a_name_that_was_never_mindspeeds_is_an_ordinary_error():
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("mindspeed.plugnis")
    assert type(caught.value) is ModuleNotFoundError
    assert str(caught.value) == "No module named 'mindspeed.plugnis'"
    assert importlib.util.find_spec("mindspeed.plugnis") is None


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


@pytest.mark.parametrize("former", MOVED)
def test_a_former_name_leads_to_a_module_or_an_object_that_exists(former):
    module, _, name = MOVED[former].partition(":")
    assert importlib.util.find_spec(module) is not None
    if name and not module.startswith("mindspeed.megatron."):
        pkgutil.resolve_name(MOVED[former])
