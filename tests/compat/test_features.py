"""A feature written for MindSpeed works unchanged, and what it does wrong is said."""

import inspect
import sys
from argparse import Namespace

import pytest

from mindspeed import registry
from mindspeed.args_utils import get_mindspeed_args
from mindspeed.compat.activation import repatch
from mindspeed.engine.runtime import session
from mindspeed.features_manager import FEATURES_LIST, create_features_list
from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager as Manager
from tests.compat import features, targets
from tests.compat.conftest import problems_of


def apply(*listed, argv=()):
    """What a consumer does: replace the list, read the command line, apply."""
    sys.argv[1:] = argv
    Manager.set_features_list([*create_features_list(), *listed])
    Manager.apply_features_patches(get_mindspeed_args())


def place(kind):
    return f"tests/compat/features.py:{inspect.getsourcelines(kind)[1]}"


def rows(kind="note"):
    return [(row.feature, row.text) for row in session.current().plan.rows if row.kind == kind]


def test_a_feature_is_switched_on_by_its_own_argument_and_its_wrapper_works():
    apply(features.ScaleMlpFeature(), argv=["--scale-mlp", "--scale-mlp-factor", "5"])
    assert targets.double(1) == 10
    plan = session.current().plan
    assert plan.names == ("compat:scale-mlp",)
    assert plan.features[0].args == {"scale_mlp_factor": 5}
    (site,) = [one for one in session.current().applied.sites if one.site == "tests.compat.targets:double"]
    assert site.owners == ("compat:scale-mlp",)


def test_without_its_argument_a_feature_is_off():
    apply(features.ScaleMlpFeature(), argv=["--scale-mlp-factor", "5"])
    assert targets.double(1) == 2
    assert session.current().plan.names == ()


def test_a_feature_is_switched_on_by_name_and_is_a_row_of_the_list_with_its_settings():
    Manager.set_features_list([features.ScaleMlpFeature()])
    Manager.apply_features_patches(get_mindspeed_args())
    registry.deactivate()
    found = registry.catalog().usable["compat:scale-mlp"]
    assert found.where == f"tests not installed, {place(features.ScaleMlpFeature)}"
    assert found.feature.summary() == "Scale the output of every MLP"
    assert {name: field.description for name, field in found.feature.Args.model_fields.items()} == {
        "scale_mlp_factor": "the factor"
    }
    plan = registry.plan(features=["compat:scale-mlp"], settings={"compat:scale-mlp": {"scale_mlp_factor": 7}})
    registry.activate(plan)
    assert targets.double(1) == 14


@pytest.mark.guards(39)
def test_what_its_validation_refuses_is_a_problem_that_names_feature_and_place():
    (problem,) = problems_of(apply, features.ScaleMlpFeature(), argv=["--scale-mlp", "--scale-mlp-factor", "-1"])
    assert problem.code == "MS304"
    assert problem.message == (
        "compat:scale-mlp: the checks of the feature refuse the arguments: --scale-mlp-factor must be positive"
    )
    assert problem.where == f"tests not installed, {place(features.ScaleMlpFeature)}"
    assert session.current() is None


@pytest.mark.guards(32)
def test_a_level_0_feature_is_always_on_and_later_features_of_the_list_wrap_outside():
    always, scale = features.AlwaysFeature(), features.ScaleMlpFeature()
    apply(scale, always, argv=["--scale-mlp"])
    assert session.current().plan.names == ("compat:scale-mlp", "compat:always")
    assert targets.double(1) == ("bracket", 6)
    registry.deactivate()
    apply(always)
    assert session.current().plan.names == ("compat:always",)


@pytest.mark.guards(11)
def test_a_feature_that_no_argument_can_switch_on_is_said():
    apply(features.SchemeFeature())
    reason = "no argument switches it on: --quant-engine does not exist, it registers --quant-scheme"
    assert ("compat:quant-engine", reason) in rows()


@pytest.mark.guards(11)
def test_an_argument_of_a_feature_that_it_cannot_switch_on_is_an_error():
    (problem,) = problems_of(apply, features.SchemeFeature(), argv=["--quant-scheme", "w4a4"])
    assert problem.code == "MS110"
    assert problem.message == (
        "--quant-scheme is given to compat:quant-engine, but no argument switches it on: --quant-engine does not exist, "
        "it registers --quant-scheme"
    )
    assert problem.where == place(features.SchemeFeature)


@pytest.mark.guards(15)
def test_a_check_against_a_name_that_nobody_has_is_an_error_of_the_feature():
    (problem,) = problems_of(apply, features.DeadCheckFeature(), argv=["--dead-check"])
    assert problem.features == ("compat:dead-check",)
    assert problem.message == (
        "compat:dead-check: the checks of the feature refuse the arguments: dead_check excludes fused_ema_adamw, which "
        "is neither a feature nor an argument of Megatron or of any feature"
    )


def test_the_two_checks_raise_what_they_mean():
    feature = features.CheckingFeature()
    (problem,) = problems_of(feature.incompatible_check, Namespace(checking=True, num_layers=4), "num_layers")
    assert problem.message == "checking and num_layers conflict"
    assert problem.fix_text == "remove checking or num_layers"
    feature.incompatible_check(Namespace(checking=False), "num_layers")
    (problem,) = problems_of(feature.dependency_check, Namespace(checking=True), "sequence_parallel")
    assert problem.message == "the feature checking requires sequence_parallel, which is not active"
    (problem,) = problems_of(feature.dependency_check, Namespace(checking=True), "sequence_paralel")
    assert problem.code == "MS110"
    assert problem.fix_text.startswith("did you mean sequence_parallel")


def test_two_old_features_that_exclude_each_other_are_refused():
    (problem,) = problems_of(
        apply, features.ScaleMlpFeature(), features.ExcludingFeature(), argv=["--scale-mlp", "--excluding"]
    )
    assert problem.message == (
        "compat:excluding: the checks of the feature refuse the arguments: excluding and scale_mlp conflict"
    )


def test_a_validation_that_reads_a_size_nobody_gave_is_listed_as_not_checked():
    apply(features.CheckingFeature(), argv=["--checking"])
    text = "'the checks of the feature refuse the arguments: ?' depends on num_layers"
    assert ("compat:checking", text) in rows("not-checked")
    registry.deactivate()
    (problem,) = problems_of(repatch, {"num_layers": 3})
    assert problem.message == "compat:checking: the checks of the feature refuse the arguments: an odd number of layers"


def test_the_forced_replacement_of_a_later_feature_wins_and_is_said(capsys):
    apply(features.ReplacingFeature(), features.ForcingFeature())
    assert targets.double(1) == 4
    text = "patch of tests.compat.targets.double with triple: compat:forcing replaces it with quadruple and force=True"
    assert ("compat:replacing", text) in rows("left-out")
    assert f"mindspeed: compat:replacing: {text}\n" in capsys.readouterr().err


def test_two_replacements_without_force_are_a_conflict():
    class Other(features.ReplacingFeature):
        def __init__(self):
            super().__init__()
            self.feature_name = "other"

    (problem,) = problems_of(apply, features.ReplacingFeature(), Other())
    assert problem.message == (
        "compat:other and compat:replacing replace tests.compat.targets:double, but only one feature can"
    )


def test_a_broken_feature_does_not_take_the_others_with_it():
    Manager.set_features_list([features.AlwaysFeature(), features.BrokenFeature()])
    Manager.apply_features_patches(Namespace())
    assert session.current().plan.names == ("compat:always",)
    problem = registry.catalog().broken["compat:broken"].problem
    assert problem.message == "feature compat:broken cannot be read: RuntimeError: no arguments today"
    assert ("compat:broken", problem.message) in rows()


def test_the_list_is_one_object_and_ours_are_in_it():
    assert FEATURES_LIST is Manager.FEATURES_LIST
    names = {feature.feature_name for feature in create_features_list()}
    assert {"rms_norm", "swiglu", "ring_attention"} <= names
    assert {feature.feature_name for feature in Manager.create_features_list()} == names
    Manager.set_features_list([features.AlwaysFeature()])
    assert [feature.feature_name for feature in FEATURES_LIST] == ["always"]


def test_features_of_ours_are_switched_on_by_their_old_flags_and_only_while_they_are_in_the_list(capsys):
    world = {"normalization": "RMSNorm"}
    apply(argv=["--use-fused-rmsnorm", "--normalization", "RMSNorm"])
    assert session.current().plan.names == ("rms-norm",)
    assert (
        capsys.readouterr().err.count("--use-fused-rmsnorm switches on rms-norm; the new spelling is --features rms-norm\n")
        == 1
    )
    assert session.current().plan.world.normalization == world["normalization"]
    Manager.set_features_list([features.AlwaysFeature()])
    Manager.apply_features_patches(get_mindspeed_args())
    assert session.current().plan.names == ("compat:always",)
    assert ("compat", "--use-fused-rmsnorm has no effect: rms-norm is not in the list of features") in rows()


@pytest.mark.guards(29)
def test_repatch_takes_a_dictionary_of_arguments_and_plans_again():
    apply(features.ScaleMlpFeature())
    repatch({"scale_mlp": True, "scale_mlp_factor": 4, "tensor_model_parallel_size": 2, "world_size": 2})
    plan = session.current().plan
    assert plan.names == ("compat:scale-mlp", "tensor-parallel")
    assert plan.world.tp == 2
    assert targets.double(1) == 8
    repatch({"scale_mlp": False})
    assert targets.double(1) == 2
    repatch(Namespace(scale_mlp=True))
    assert targets.double(1) == 8


def test_repatch_to_the_plan_agreement_changes_nothing_and_a_wrong_one_leaves_the_plan_before():
    apply(features.ScaleMlpFeature(), argv=["--scale-mlp"])
    first = targets.double
    repatch({"scale_mlp_factor": 3})
    assert targets.double is first
    (problem,) = problems_of(repatch, {"scale_mlp_factor": -3})
    assert problem.code == "MS304"
    assert targets.double is first


def test_arguments_that_repatch_refused_are_forgotten():
    apply(features.ScaleMlpFeature(), argv=["--scale-mlp"])
    remembered = dict(vars(get_mindspeed_args()))
    (problem,) = problems_of(repatch, {"scale_mlp_factor": -3, "use_fused_rmsnorm": False, "num_layers": 4})
    assert problem.code == "MS304"
    assert vars(get_mindspeed_args()) == remembered
    repatch({"use_fused_rmsnorm": True, "normalization": "RMSNorm"})
    assert session.current().plan.names == ("compat:scale-mlp", "rms-norm")
    assert not session.current().plan.world.knows("num_layers")


def test_repatch_switches_a_feature_of_ours_off_that_was_active_before():
    registry.activate(registry.plan(features=["rms-norm"], world={"normalization": "RMSNorm"}))
    repatch({"use_fused_rmsnorm": False})
    assert session.current().plan.names == ()


def test_validation_by_the_manager_collects_the_refusals_of_all():
    Manager.set_features_list([features.ScaleMlpFeature(), features.CheckingFeature()])
    args = Namespace(scale_mlp=True, scale_mlp_factor=0, checking=False, num_layers=3)
    Manager.pre_validate_features_args(args)
    problems = problems_of(Manager.validate_features_args, args)
    assert [problem.message for problem in problems] == [
        "compat:scale-mlp: --scale-mlp-factor must be positive",
        "compat:checking: an odd number of layers",
    ]
    Manager.post_validate_features_args(args)


@pytest.mark.parametrize("given", [["--checking-layers", "1", "2"], []])
def test_arguments_with_several_values_become_settings(given):
    apply(features.CheckingFeature(), argv=["--checking", "--num-layers", "2", *given])
    expected = [1, 2] if given else None
    assert session.current().plan.features[0].args == {"checking_layers": expected}


def test_what_only_followed_from_the_old_arguments_does_not_stay():
    settings = {"data-parallel": {"reduce_in_fp32": True}}
    registry.activate(registry.plan(world={"world_size": 4}, settings=settings))
    assert session.current().plan.names == ("data-parallel",)
    repatch({"num_layers": 4})
    assert session.current().plan.features[0].args == {"reduce_in_fp32": True}
    repatch({"tensor_model_parallel_size": 4})
    assert session.current().plan.names == ("tensor-parallel",)


def test_arguments_that_nobody_knows_are_said(capsys):
    repatch({"use_fused_rmsnrom": True, "num_layers": 4})
    said = "mindspeed: compat: no feature reads use_fused_rmsnrom, and Megatron has no such argument\n"
    assert capsys.readouterr().err == said


def test_megatrons_own_arguments_switch_features_on_as_they_do_on_its_command_line():
    repatch({"tensor_model_parallel_size": 2, "world_size": 2, "sequence_parallel": True, "recompute_granularity": "selective"})
    assert session.current().plan.names == ("recompute", "tensor-parallel", "sequence-parallel")
    assert session.current().plan.features[0].args["granularity"] == "selective"


def test_what_fails_inside_a_feature_is_a_problem_of_that_feature():
    class Failing(MindSpeedFeature):
        def __init__(self):
            super().__init__("failing", optimization_level=0)

        def register_patches(self, patch_manager, args):
            raise KeyError("nothing here")

    class Unsure(MindSpeedFeature):
        def is_need_apply(self, args):
            return args.of_nobody > 1

    problems = problems_of(apply, Failing(), Unsure("unsure"))
    assert [(problem.code, problem.message) for problem in problems] == [
        (
            "MS901",
            "compat:unsure raised an error in is_need_apply: 'Namespace' object has no attribute 'of_nobody'",
        ),
        (
            "MS901",
            "feature compat:failing, which uses MindSpeed's interface, failed when it registered its patches: 'nothing here'",
        ),
    ]


def test_a_feature_that_needs_a_package_that_is_missing_says_so():
    class Needy(MindSpeedFeature):
        def __init__(self):
            super().__init__("needy", optimization_level=0)

        def register_patches(self, patch_manager, args):
            import no_such_accelerator

            patch_manager.register_patch("tests.compat.targets.double", no_such_accelerator.double)

    (problem,) = problems_of(apply, Needy())
    assert problem.code == "MS406"
    assert problem.message == (
        "feature compat:needy, which uses MindSpeed's interface, cannot register its patches, because an import failed: "
        "No module named 'no_such_accelerator'"
    )
    assert problem.fix_text == "install no_such_accelerator"


def test_a_feature_that_is_written_for_another_version_of_a_package_says_so():
    class Elsewhere(MindSpeedFeature):
        def __init__(self):
            super().__init__("elsewhere", optimization_level=0)

        def register_patches(self, patch_manager, args):
            from tests.compat.targets import no_longer_there

            patch_manager.register_patch("tests.compat.targets.double", no_longer_there)

    (problem,) = problems_of(apply, Elsewhere())
    assert (problem.code, problem.fix_text) == ("MS406", "use the version of tests that the feature was written for")
