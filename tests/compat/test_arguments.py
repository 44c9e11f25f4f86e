"""Arguments as MindSpeed's consumers read and write them."""

import sys
from argparse import Namespace

import pytest

from mindspeed import args_utils, registry
from mindspeed.args_utils import get_full_args, get_mindspeed_args
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
from tests.compat import features


def test_the_command_line_is_read_once_by_parsers_where_there_are_some_and_else_by_its_look():
    sys.argv[1:] = ["--sparse-mode", "2", "--num-layers", "4", "--lr", "1e-3", "--bf16", "--split", "9,1", "--name=inf"]
    sys.argv += ["--betas", "0.9", "0.95", "--seed", "-1"]
    args = get_mindspeed_args()
    assert (args.sparse_mode, args.num_layers, args.bf16, args.split, args.name) == (2, 4, True, "9,1", "inf")
    assert (args.betas, args.seed, args.lr) == ([0.9, 0.95], -1, 1e-3)
    assert args.use_fused_rmsnorm is False
    sys.argv[1:] = []
    assert get_mindspeed_args() is args
    assert get_full_args() is args


@pytest.mark.guards(35)
def test_defaults_are_learnt_without_the_command_line_and_leave_nothing():
    sys.argv[1:] = ["--use-fused-rmsnorm"]
    MindSpeedFeaturesManager.set_features_list([*MindSpeedFeaturesManager.create_features_list(), features.ScaleMlpFeature()])
    defaults = get_mindspeed_args(get_defaults=True)
    assert (defaults.use_fused_rmsnorm, defaults.scale_mlp_factor, defaults.optimization_level) == (False, 3, 2)
    assert args_utils._MINDSPEED_ARGS is None


def test_a_consumer_may_write_the_arguments():
    args_utils._MINDSPEED_ARGS = Namespace(use_fused_rmsnorm=True)
    assert get_mindspeed_args().use_fused_rmsnorm is True


def test_the_arguments_show_what_the_active_plan_has_even_when_its_flags_are_taken_out():
    registry.activate(registry.plan(features=["rms-norm"], world={"normalization": "RMSNorm", "tp": 2, "world_size": 2}))
    args = get_mindspeed_args()
    assert (args.use_fused_rmsnorm, args.use_fused_swiglu) == (True, False)
    assert (args.tensor_model_parallel_size, args.normalization) == (2, "RMSNorm")


def test_megatrons_own_arguments_win_once_it_has_them(monkeypatch):
    theirs = Namespace(num_layers=7)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", Namespace(_GLOBAL_ARGS=theirs))
    assert get_full_args() is theirs


def test_a_feature_may_add_a_choice_to_an_argument_of_another():
    class Adding(features.MindSpeedFeature):
        def __init__(self):
            super().__init__("adding")

        def register_args(self, parser):
            self.add_parser_argument_choices_value(parser, "--quant-scheme", "w2a2")
            self.add_parser_argument_choices_value(parser, "--of-nobody", "x")

    sys.argv[1:] = ["--quant-scheme", "w2a2"]
    MindSpeedFeaturesManager.set_features_list([features.SchemeFeature(), Adding()])
    assert get_mindspeed_args().quant_scheme == "w2a2"
