"""Which patches a plan has for which Megatron version: needs none of the old versions, so that a lost guard is noticed."""

import pytest

import mindspeed
from mindspeed.engine.planning.plan import ActivationPlan
from mindspeed.engine.resolution.environment import SUPPORTED_MEGATRON, made_up, version_in
from mindspeed.megatron.fixes.feature import TABLES
from mindspeed.plugins import Ref
from mindspeed.problems import ResolutionError
from tests.megatron.versions.cases import FEATURES

VERSIONS = ("0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.1", "0.20.0")
WORLD = {
    "world_size": 16,
    "tp": 2,
    "pp": 2,
    "vpp": 2,
    "ep": 2,
    "num_layers": 8,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "num_experts": 4,
    "vocab_size": 64,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation": "silu",
    "rotary": True,
}
MOE = "megatron.core.transformer.moe"
GEGLU = "megatron.core.fusions.fused_bias_geglu"
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
CHECKPOINTS = "megatron.core.dist_checkpointing"
UNCOMPILED = "mindspeed.megatron.fixes.layers:uncompiled"

NUMPY = {
    (f"{CHECKPOINTS}.mapping:ShardedTensor.local_coordinates", "mindspeed.megatron.fixes.numpy2:local_coordinates"),
    (f"{CHECKPOINTS}.exchange_utils:_shard_size", "mindspeed.megatron.fixes.numpy2:shard_size"),
    (f"{CHECKPOINTS}.validation:_validate_sharding_for_key_flattened", "mindspeed.megatron.fixes.numpy2:check_coverage"),
}
QUICK_GEGLU = {
    (f"{GEGLU}:{name}", UNCOMPILED)
    for name in (
        "quick_gelu",
        "quick_geglu",
        "quick_geglu_back",
        "weighted_quick_geglu",
        "weighted_quick_geglu_back",
        "weighted_bias_quick_geglu",
        "weighted_bias_quick_geglu_back",
    )
}
RESHARDABLE = {(f"{OPTIMIZER}.sharded_state_dict", "mindspeed.megatron.fixes.optimizer:reshardable")}
ONLY_SINCE_0_16 = {
    ("importlib.machinery:PathFinder.find_spec", "mindspeed.megatron.fixes.kernels:import_without_triton"),
    (
        "megatron.core.pipeline_parallel.utils:set_ideal_affinity_for_current_gpu",
        "mindspeed.megatron.fixes.layers:near_its_gpu",
    ),
    ("megatron.core.transformer.attention:Attention._apply_output_gate", UNCOMPILED),
    (f"{MOE}.router:TopKRouter._apply_expert_bias", UNCOMPILED),
    (f"{MOE}.token_dispatcher:MoEFlexTokenDispatcher.dispatch_preprocess", UNCOMPILED),
    ("megatron.core.fusions.fused_pad_routing_map:fused_pad_routing_map", UNCOMPILED),
}
ONLY_IN_0_14 = {
    (f"{OPTIMIZER}._get_main_param_and_optimizer_states", "mindspeed.megatron.fixes.optimizer:leave_step"),
}
_FIXES = "mindspeed.megatron.fixes"
ONLY_BEFORE_0_17 = {
    ("megatron.core.transformer.multi_latent_attention:HAVE_TE", Ref(f"{_FIXES}.layers:HAVE_ENGINE")),
    ("megatron.core.utils:is_te_min_version", f"{_FIXES}.layers:false_without_engine"),
    ("megatron.legacy.fused_kernels:load", f"{_FIXES}.kernels:build_nothing"),
    (f"{MOE}.moe_utils:router_gating_linear", f"{_FIXES}.moe:gate_without_engine"),
    (
        f"{CHECKPOINTS}.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data",
        f"{_FIXES}.saving:end_with_rank",
    ),
}
SYNCHRONOUS = {
    (f"{CHECKPOINTS}.strategies.base:AsyncSaveShardedStrategy.save", f"{_FIXES}.saving:collect_in_process"),
    (
        f"{CHECKPOINTS}.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data_multiproc",
        f"{_FIXES}.saving:write_in_threads",
    ),
}
SYNCHRONOUS_SINCE_0_17 = {
    (f"{CHECKPOINTS}.strategies.torch:TorchDistSaveShardedStrategy.save", f"{_FIXES}.saving:collect_in_process")
}
BEFORE_0_19 = {
    ("megatron.core.tensor_parallel.mappings:_reduce", f"{_FIXES}.sums:sum_of_any_strides"),
    (f"{MOE}.moe_layer:MoELayer.__init__", f"{_FIXES}.moe:own_replicas_of_experts"),
    (f"{MOE}.router:TopKRouter.apply_z_loss", f"{_FIXES}.moe:z_loss_of_all_ranks"),
    (f"{MOE}.router:TopKRouter.attach_and_log_load_balancing_loss", f"{_FIXES}.moe:balance_loss_of_all_ranks"),
}
"""Sums and weights of losses that Megatron before 0.19 gets wrong: of experts, per token, and of strided tensors."""
SINCE_0_15 = {(f"{MOE}.moe_layer:MoELayer.__init__", f"{_FIXES}.moe:outputs_of_whole_experts")}
HYBRID_MODEL = {
    ("megatron.core.models.hybrid.hybrid_model:HybridModel.__init__", "mindspeed.megatron.hook_wrappers:hybrid_model_init"),
}
WITHOUT_INFERENCE = {
    (
        "megatron.core.tensor_parallel.inference_layers:is_inference_column_parallel_linear",
        "mindspeed.megatron.fixes.layers:is_no_mock",
    ),
}
FSDP2 = {
    (
        "megatron.core.distributed.data_parallel_base:_BaseDataParallel.finish_grad_sync",
        "mindspeed.megatron.fixes.optimizer:reduced_by_torch",
    ),
}
_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
SPARSE_ATTENTION = {
    (f"{_DSA}:DSAIndexerLossLoggingHelper.save_loss_to_tracker", f"{_FIXES}.attention:losses_of_model_layers"),
    (f"{_DSA}:rotate_activation", f"{_FIXES}.attention:rotated_without_its_package"),
}
SPARSE_PREDICTIONS = {
    ("megatron.core.models.gpt.gpt_layer_specs:get_gpt_mtp_block_spec", f"{_FIXES}.attention:predictions_of_sparse_attention")
}
SPARSE_LAYERS = {
    (
        "megatron.core.models.gpt.experimental_attention_variant_module_specs:get_experimental_attention_variant_module_spec",
        f"{_FIXES}.attention:layer_of_sparse_attention",
    )
}
_SINCE_0_16 = SINCE_0_15 | QUICK_GEGLU | RESHARDABLE | ONLY_SINCE_0_16 | SPARSE_ATTENTION
_BEFORE_0_18, _BEFORE_0_19 = SPARSE_LAYERS | SPARSE_PREDICTIONS, SPARSE_PREDICTIONS
GUARDED = {
    "0.14.0": NUMPY | BEFORE_0_19 | ONLY_IN_0_14 | ONLY_BEFORE_0_17,
    "0.15.3": NUMPY | BEFORE_0_19 | SINCE_0_15 | QUICK_GEGLU | RESHARDABLE | SYNCHRONOUS | ONLY_BEFORE_0_17,
    "0.16.1": _SINCE_0_16 | _BEFORE_0_18 | BEFORE_0_19 | FSDP2 | SYNCHRONOUS | ONLY_BEFORE_0_17,
    "0.17.1": _SINCE_0_16 | _BEFORE_0_18 | BEFORE_0_19 | FSDP2 | SYNCHRONOUS_SINCE_0_17,
    "0.18.2": _SINCE_0_16 | _BEFORE_0_19 | BEFORE_0_19 | FSDP2 | SYNCHRONOUS_SINCE_0_17,
    "0.19.1": _SINCE_0_16 | HYBRID_MODEL | SYNCHRONOUS_SINCE_0_17,
    "0.20.0": _SINCE_0_16 | HYBRID_MODEL | SYNCHRONOUS_SINCE_0_17 | WITHOUT_INFERENCE,
}
"""The patches ``(target, value)`` that some versions have and others have not."""


def plan_for(version: str, platform: str = "cpu") -> ActivationPlan:
    return mindspeed.plan(FEATURES, world=WORLD, environment=made_up(platform, version))


def applied(plan: ActivationPlan) -> set[tuple[str, object]]:
    return {(planned.patch.target, planned.patch.value) for planned in plan.patches if not planned.skipped}


@pytest.fixture(scope="module")
def plans() -> dict[str, ActivationPlan]:
    return {version: plan_for(version) for version in VERSIONS}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_has_the_patches_that_it_needs_and_no_others(plans: dict[str, ActivationPlan], version: str) -> None:
    sets = {name: applied(plan) for name, plan in plans.items()}
    everywhere = set.intersection(*sets.values())
    assert sets[version] - everywhere == GUARDED[version]


@pytest.mark.parametrize("version", VERSIONS)
def test_all_features_are_planned_for_every_version(plans: dict[str, ActivationPlan], version: str) -> None:
    assert set(plans[version].names) >= set(FEATURES)
    assert plans[version].environment["megatron"] == version


def test_two_patches_of_one_site_never_mend_the_same(plans: dict[str, ActivationPlan]) -> None:
    bugs = {f"{_FIXES}.{row['by']}": row["bug"] for row in TABLES["fixes"]}
    for plan in plans.values():
        patches = [planned for planned in plan.patches if planned.owner == "megatron-fixes" and not planned.skipped]
        mended = [(planned.site, bugs.get(str(planned.patch.value))) for planned in patches]
        assert len(mended) == len(set(mended))


def test_a_patch_for_other_versions_says_which(plans: dict[str, ActivationPlan]) -> None:
    skipped = {planned.patch.target: planned.skipped for planned in plans["0.14.0"].patches if planned.skipped}
    assert skipped[f"{GEGLU}:quick_geglu"] == "only for megatron-core >=0.15"
    assert skipped["importlib.machinery:PathFinder.find_spec"] == "only for megatron-core >=0.16"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("platform", ["cuda", "npu"])
def test_the_guards_hold_on_accelerators_too(version: str, platform: str) -> None:
    expected = {(target, value) for target, value in GUARDED[version] if value != UNCOMPILED}
    assert expected <= applied(plan_for(version, platform))


def test_versions_outside_the_range_are_refused() -> None:
    assert all(version_in(version, SUPPORTED_MEGATRON) for version in (*VERSIONS, "0.15.0", "0.16.0", "0.18.0"))
    for version in ("0.12.1", "0.13.1"):
        with pytest.raises(ResolutionError) as refused:
            plan_for(version)
        assert [str(problem) for problem in refused.value.problems if problem.code == "MS502"] == [
            (
                f"MS502 megatron-core {version} is not supported; supported is >=0.14,<0.21\n"
                "  where: made up\n"
                "  fix: pip install megatron-core==0.16.1"
            )
        ]


def test_a_release_after_the_tested_ones_is_planned_with_a_warning() -> None:
    tested, untested = ([row.text for row in plan_for(v).rows if row.kind == "warning"] for v in ("0.20.0", "0.21.0"))
    newer = "megatron-core 0.21.0 is newer than the releases that features are tested on, >=0.14,<0.21"
    assert untested == [*tested, newer]
