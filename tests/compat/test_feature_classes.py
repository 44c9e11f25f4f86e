"""MindSpeed's feature classes: their names exist, stand for features of ours, and may be derived from."""

import argparse

import pytest
import torch

from mindspeed import registry
from mindspeed.compat.feature_classes import CLASSES, stand_in
from mindspeed.engine.runtime import session
from mindspeed.features_manager import (
    CoCFeature,
    FusedSwigluFeature,
    MegatronBasicFeature,
    VirtualOptimizerFeature,
)
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager as Manager


def test_every_class_stands_for_features_that_exist_or_says_why_for_none():
    known = registry.catalog().usable.keys()
    for name, old in CLASSES.items():
        assert set(old.features) <= known, name
        assert old.features or old.reason, name
        feature = stand_in(name)()
        assert (feature.feature_name, feature.optimization_level) == (old.name.replace("-", "_"), old.level)
        feature.register_args(argparse.ArgumentParser(allow_abbrev=False))


def test_a_list_of_mindspeeds_classes_switches_our_features_on_by_their_old_flags():
    Manager.set_features_list([FusedSwigluFeature(), MegatronBasicFeature(), VirtualOptimizerFeature()])
    Manager.apply_features_patches(argparse.Namespace(use_fused_swiglu=True, swiglu=True, use_ascend_coc=True))
    names = session.current().plan.names
    assert "swiglu" in names
    assert "coc" not in names  # its class is not in the list
    assert not any(name.startswith("compat:") for name in names)


def test_a_class_that_derives_from_one_of_mindspeeds_brings_its_own_patches():
    def with_more_wrapper(fn):
        return lambda *args: fn(*args) + 1

    class MoreCoCFeature(CoCFeature):
        def register_patches(self, patch_manager, args):
            super().register_patches(patch_manager, args)
            patch_manager.register_patch("tests.compat.targets.double", with_more_wrapper)

    feature = MoreCoCFeature()
    assert (feature.is_extended, CoCFeature().is_extended) == (True, False)
    Manager.set_features_list([feature])
    Manager.apply_features_patches(argparse.Namespace(use_ascend_coc=False))
    assert session.current() is None or not session.current().plan.names
    assert not feature.is_need_apply(argparse.Namespace(use_ascend_coc=False))
    assert feature.is_need_apply(argparse.Namespace(use_ascend_coc=True))


def test_a_class_that_derives_from_one_of_mindspeeds_may_register_a_flag_of_it_anew():
    class GatedExpertsFeature(stand_in("MoESharedExpertsFeature")):
        def register_args(self, parser):
            super().register_args(parser)
            parser.add_argument("--shared-expert-gate", action="store_true", default=False)

        def register_patches(self, patch_manager, args):
            pass

    Manager.set_features_list([GatedExpertsFeature()])
    parser = argparse.ArgumentParser(allow_abbrev=False)
    Manager.register_features_args(parser)
    assert parser.conflict_handler == "error"
    args = parser.parse_args(["--n-shared-experts", "2", "--shared-expert-gate"])
    assert (args.n_shared_experts, args.shared_expert_gate) == (2, True)


@pytest.mark.parametrize("name", ["RingAttentionUpdateOpBuilder", "GMMOpBuilder", "LcalOpBuilder", "MatmulAddOpBuilder"])
def test_a_builder_loads_the_functions_of_its_operator(name):
    from mindspeed import op_builder

    loaded = vars(getattr(op_builder, name)().load())
    assert loaded
    assert all(callable(function) for function in loaded.values())


def test_operators_of_mindspeed_with_other_arguments_call_ours():
    from mindspeed.ops.gmm import _npu_gmm
    from mindspeed.ops.grouped_matmul import eager_grouped_matmul
    from mindspeed.ops.npu_gmm import npu_gmm
    from mindspeed.ops.npu_matmul_add import npu_matmul_add_fp16

    x, weight = torch.randn(6, 4), torch.randn(2, 4, 3)
    whole = torch.cat([x[:2] @ weight[0], x[2:] @ weight[1]])
    torch.testing.assert_close(_npu_gmm(None, x, weight, group_list=[2, 6]), npu_gmm(x, weight, group_list=[2, 6]))
    torch.testing.assert_close(eager_grouped_matmul(x, torch.tensor([2, 4]), weight), whole)
    torch.testing.assert_close(eager_grouped_matmul(x, [2, 4], weight.transpose(1, 2)), whole)
    total = torch.zeros(3, 4)
    npu_matmul_add_fp16(x, whole, total)
    torch.testing.assert_close(total, whole.t() @ x)
