"""Old features on Megatron: on its modules, under its parser, and in the proof."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed.args_utils import get_mindspeed_args
from mindspeed.compat.megatron_lm import MegatronArguments, with_arguments_of_features, with_validation_of_features
from mindspeed.engine.runtime import session
from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager as Manager
from tests.compat import features
from tests.compat.conftest import problems_of

CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")


class CountCallsFeature(MindSpeedFeature):
    """Count what rank this is asked for."""

    calls: list[str] = []  # noqa: RUF012

    def __init__(self):
        super().__init__("count-calls")

    def register_args(self, parser):
        parser.add_argument("--count-calls", action="store_true")

    def register_patches(self, patch_manager, args):
        def counting_wrapper(fn):
            def count(self):
                CountCallsFeature.calls.append(type(self).__name__)
                return fn(self)

            return count

        target = "megatron.core.transformer.transformer_config.TransformerConfig.__post_init__"
        patch_manager.register_patch(target, counting_wrapper)


def test_a_wrapper_on_megatron_core_is_called_and_the_proof_counts_it():
    sys.argv[1:] = ["--count-calls"]
    Manager.set_features_list([CountCallsFeature()])
    Manager.apply_features_patches(get_mindspeed_args())
    from megatron.core.transformer.transformer_config import TransformerConfig

    CountCallsFeature.calls.clear()
    TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    assert CountCallsFeature.calls == ["TransformerConfig"]
    (proof,) = session.report().features
    assert (proof.name, proof.stability) == ("compat:count-calls", "experimental")
    (point,) = proof.points
    assert (point.effective, point.calls) == (True, 1)


def test_a_wrapper_makes_megatrons_parser_take_the_arguments_of_the_list():
    def parse_args(extra_args_provider=None, ignore_unknown_args=False):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--num-layers", type=int)
        parser = extra_args_provider(parser) if extra_args_provider is not None else parser
        return parser.parse_args(["--num-layers", "2", "--scale-mlp", "--of-script", "1", "--use-fused-swiglu"])

    def of_script(parser):
        parser.add_argument("--of-script")
        return parser

    Manager.set_features_list([*Manager.create_features_list(), features.ScaleMlpFeature()])
    args = with_arguments_of_features(parse_args)(of_script)
    assert (args.scale_mlp, args.scale_mlp_factor, args.of_script, args.use_fused_swiglu) == (True, 3, "1", True)


def test_the_features_see_the_arguments_before_and_after_megatron_and_may_refuse_them():
    seen = []

    class Watching(MindSpeedFeature):
        def __init__(self):
            super().__init__("watching")

        def pre_validate_args(self, args):
            seen.append(("pre", args.value))

        def validate_args(self, args):
            seen.append(("validate", args.value))
            if args.value == 3:
                raise ValueError("not three")

        def post_validate_args(self, args):
            seen.append(("post", args.value))

    def validate_args(args, defaults):
        args.value += 1
        return args

    Manager.set_features_list([Watching()])
    wrapped = with_validation_of_features(validate_args)
    assert wrapped(argparse.Namespace(value=1), {}).value == 2
    assert seen == [("pre", 1), ("validate", 2), ("post", 2)]
    (problem,) = problems_of(wrapped, argparse.Namespace(value=2), {})
    assert problem.message == "compat:watching: not three"


def test_both_patches_of_the_parser_name_what_exists_in_megatron_lm():
    targets = [patch.target for patch in MegatronArguments(MegatronArguments.Args(), None).patches()]
    assert targets == ["megatron.training.arguments:parse_args", "megatron.training.arguments:validate_args"]


SCRIPT = """
import sys
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager as Manager
from mindspeed.args_utils import get_mindspeed_args
from tests.compat.features import ScaleMlpFeature

Manager.set_features_list([*Manager.create_features_list(), ScaleMlpFeature()])
Manager.apply_features_patches(get_mindspeed_args())
from megatron.training.arguments import parse_args
args = parse_args()
from tests.compat import targets
print(args.scale_mlp, args.scale_mlp_factor, args.swiglu, args.use_fused_swiglu, targets.double(1))
"""


@pytest.mark.long
@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH names no Megatron-LM checkout")
def test_the_real_parser_takes_old_arguments_and_none_twice(tmp_path):
    root = Path(__file__).resolve().parents[2]
    env = os.environ | {"PYTHONPATH": f"{root}:{CHECKOUT}", "MINDSPEED_PLATFORM": "cpu", "MINDSPEED_REPORT": ""}
    argv = ["--scale-mlp", "--scale-mlp-factor", "4", "--swiglu", "--use-fused-swiglu", "--num-layers", "2"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *argv], capture_output=True, text=True, env=env, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True 4 True True 8"
