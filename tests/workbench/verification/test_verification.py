"""The proof harness: it finds planted faults and features that do nothing, and it does not blame healthy ones."""

import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from mindspeed.cli import main
from mindspeed.engine.planning.patch_checks import with_sites
from mindspeed.engine.planning.plan import PlannedPatch
from mindspeed.engine.resolution.request import Layer
from mindspeed.features.rms_norm.feature import RmsNorm
from mindspeed.plugins.patches import Wrap
from mindspeed.problems import RunError
from mindspeed.registry import catalog
from mindspeed.workbench.verification import case as case_module
from mindspeed.workbench.verification import pool as workers
from mindspeed.workbench.verification.case import VerificationCase, build_case
from mindspeed.workbench.verification.comparison import ComparisonResult
from mindspeed.workbench.verification.harness import Verdict, missing_effects, verify
from mindspeed.workbench.verification.pool import WorkerPool
from mindspeed.workbench.verification.record import RankResult
from tests.workbench.verification import faults

FINALIZE = "megatron.core.distributed.finalize_model_grads"
MAPPINGS = "megatron.core.tensor_parallel.mappings"
BUFFER = "megatron.core.distributed.param_and_grad_buffer"
REDUCE_GRADIENTS = f"{BUFFER}:_ParamAndGradBucketGroup.start_grad_sync"
RECEIVE = "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator.recv_forward"
ROTARY = "mindspeed.ops.npu_rotary_position_embedding"
UNPERMUTE = "mindspeed.ops.npu_fused_moe_token_unpermute"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
EMBEDDING = "embedding.word_embeddings.weight"

CONTEXT = "mindspeed.context_parallel"
CONTEXT_ALGORITHMS = ("ring-attention", "ulysses-attention", "kv-allgather-cp", "adaptive-cp")

NO_MODEL_HERE = {"ring-attention-update"}
"""Operator features that `verify` asks with other features: they change what those do."""

OPERATORS = {name: spec.ops for name, spec in catalog(frozenset()).specs.items() if spec.ops and name not in NO_MODEL_HERE}
"""The operator features and their operators; a new one is in every test over them by itself."""

FEATURES = (
    "rms-norm",
    "data-parallel",
    "adaptive-cp",
    "alibi",
    "async-ddp",
    "async-param-gather",
    "distributed-optimizer",
    "eod-reset",
    "expert-parallel",
    "kv-allgather-cp",
    "pipeline-parallel",
    "recompute",
    "ring-attention",
    "sequence-parallel",
    "shared-attention-mask",
    "swiglu",
    "tensor-parallel",
    "ulysses-attention",
    "virtual-pipeline",
)

FAULTS = [
    ("rms-norm", "mindspeed.ops.rms_norm:rms_norm", "scaled_up", f"gradient of {QKV}"),
    ("recompute", "megatron.core.tensor_parallel.random:_set_all_rng_states", "skipped", f"gradient of {QKV}"),
    ("tensor-parallel", f"{MAPPINGS}:_reduce", "unreduced", f"gradient of {QKV}"),
    (
        "tensor-parallel",
        "megatron.core.tensor_parallel.utils:VocabUtility.vocab_range_from_global_vocab_size",
        "shifted_range",
        f"gradient of {EMBEDDING}",
    ),
    (
        "sequence-parallel",
        f"{FINALIZE}:_allreduce_non_tensor_model_parallel_grads",
        "skipped",
        "gradient of decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
    ),
    ("sequence-parallel", f"{MAPPINGS}:_split_along_first_dim", "rolled", f"gradient of {QKV}"),
    ("pipeline-parallel", f"{FINALIZE}:_allreduce_word_embedding_grads", "skipped", f"gradient of {EMBEDDING}"),
    ("pipeline-parallel", RECEIVE, "rolled_in_place", f"gradient of {QKV}"),
    ("virtual-pipeline", f"{FINALIZE}:_allreduce_word_embedding_grads", "skipped", f"gradient of {EMBEDDING}"),
    ("virtual-pipeline", RECEIVE, "rolled_in_place", f"gradient of {QKV}"),
    ("data-parallel", REDUCE_GRADIENTS, "skipped", f"gradient of {QKV}"),
    ("distributed-optimizer", f"{BUFFER}:shard_buffer", "misplaced_shards", f"gradient of {QKV}"),
    ("distributed-optimizer", f"{BUFFER}:_ParamAndGradBucketGroup.start_param_sync", "ungathered", f"weight of {QKV}"),
    ("async-ddp", f"{BUFFER}:_ParamAndGradBucketGroup.finish_grad_sync", "skipped_at_first", f"gradient of {QKV}"),
    ("async-param-gather", f"{BUFFER}:_ParamAndGradBucketGroup.start_param_sync", "ungathered", f"weight of {QKV}"),
    ("expert-parallel", REDUCE_GRADIENTS, "skipped", f"gradient of {QKV}"),
    ("expert-parallel", f"{MAPPINGS}:all_to_all", "rolled", f"gradient of {QKV}"),
    *((name, f"{CONTEXT}.local_attention:add_gradients", "skipped", f"gradient of {QKV}") for name in CONTEXT_ALGORITHMS),
    ("alibi", "mindspeed.features.alibi.layers:with_position_bias", "nothing_changed", f"gradient of {QKV}"),
    ("eod-reset", "mindspeed.context_parallel.documents:ends_of_rows", "one_document", f"gradient of {QKV}"),
    ("shared-attention-mask", "mindspeed.context_parallel.attention_mask:make_mask", "rolled", f"gradient of {QKV}"),
    ("swiglu", "mindspeed.ops.swiglu:swiglu", "rolled", f"gradient of {QKV}"),
    ("rotary-embedding", f"{ROTARY}:npu_rotary_position_embedding", "rolled", f"gradient of {QKV}"),
    ("flash-attention", "mindspeed.ops.fusion_attention:fusion_attention", "rolled", f"gradient of {QKV}"),
    ("matmul-add", "mindspeed.ops.npu_matmul_add_fp32:npu_matmul_add_fp32", "skipped", f"gradient of {QKV}"),
    ("grouped-matmul-add", "mindspeed.ops.npu_gmm:npu_gmm", "rolled", f"gradient of {QKV}"),
    ("coc", "mindspeed.features.coc.products:gather_multiply", "rolled", f"gradient of {QKV}"),
    ("coc", "mindspeed.features.coc.products:multiply_scatter", "rolled", f"gradient of {QKV}"),
    ("mc2", "mindspeed.tensor_parallel.fused:_gathered", "rolled", f"gradient of {QKV}"),
    ("mc2", "mindspeed.tensor_parallel.fused:_scattered", "rolled", f"gradient of {QKV}"),
    ("tensor-parallel-2d", "mindspeed.features.tensor_parallel_2d.products:gather", "rolled", f"gradient of {QKV}"),
    ("tensor-parallel-2d", "mindspeed.features.tensor_parallel_2d.products:_reduce_scatter", "own_part", f"gradient of {QKV}"),
    ("moe-token-permute", f"{UNPERMUTE}:npu_fused_moe_token_unpermute", "rolled", f"gradient of {QKV}"),
]
DROPOUT: dict[str, dict[str, Any]] = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}


def each_long_but(count: int, cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters of which the first ones are in the default run."""
    return [pytest.param(*case, marks=() if index < count else pytest.mark.long) for index, case in enumerate(cases)]


def asked(feature: str, settings: Mapping[str, Mapping[str, Any]] = DROPOUT) -> VerificationCase:
    given = {name: values for name, values in settings.items() if name == feature}
    return build_case([feature], [Layer("test", settings=given)])


def planted(case: VerificationCase, target: str, fault: str, among: str = faults.__name__) -> VerificationCase:
    """The case with one more patch in the plan, as a careless feature would bring it."""
    patch = Wrap(target, f"{among}:{fault}", "a planted fault")
    fault_alone = with_sites([PlannedPatch("fault", patch, target)])
    return replace(case, plan=replace(case.plan, patches=(*case.plan.patches, *fault_alone)))


def failing(verdict: Verdict) -> list[str]:
    return [check.what for check in verdict.checks if not check.holds]


@pytest.mark.cover(
    1, of=("fault", "blamed"), because="one comparison judges all features, and every kind of fault is in the rows that run"
)
@pytest.mark.parametrize(
    ("feature", "target", "fault", "blamed"), each_long_but(1, FAULTS), ids=lambda value: str(value).rpartition(".")[2]
)
def test_a_planted_fault_is_found_and_its_parameter_named(
    pool: WorkerPool, feature: str, target: str, fault: str, blamed: str
) -> None:
    verdict = verify(planted(asked(feature), target, fault), pool)
    assert not verdict.holds
    assert blamed in failing(verdict)


@pytest.mark.cover(1, of=(), because="one comparison judges all features: the default run has one")
@pytest.mark.parametrize("feature", each_long_but(1, ((name,) for name in FEATURES)))
def test_one_gradient_times_1_001_is_found_and_only_it_is_named(pool: WorkerPool, feature: str) -> None:
    verdict = verify(planted(asked(feature), f"{FINALIZE}:finalize_model_grads", "scaled_gradient"), pool)
    gradients = [check for check in verdict.checks if not check.holds and check.what.startswith("gradient")]
    assert [check.what for check in gradients] == [f"gradient of {faults.SCALED}"]
    assert gradients[0].largest_difference == pytest.approx(1e-3, rel=0.02)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [("zero_gradient", f"gradient of {QKV} is zero"), ("nan_gradient", f"gradient of {QKV} is not finite")],
)
def test_a_gradient_that_is_zero_or_not_finite_fails(pool: WorkerPool, fault: str, sentence: str) -> None:
    verdict = verify(planted(asked("rms-norm"), f"{FINALIZE}:finalize_model_grads", fault), pool)
    assert sentence in failing(verdict)


@pytest.mark.parametrize(
    "feature", each_long_but(1, [("recompute",), ("distributed-optimizer",), ("sequence-parallel",), ("async-ddp",)])
)
@pytest.mark.guards(16, processes=True)
def test_a_configuration_equal_to_the_baselines_fails(pool: WorkerPool, feature: str) -> None:
    case = asked(feature, {})
    overrides = tuple(
        replace(planned, override=replace(planned.override, value=None if feature == "recompute" else False))
        if feature in planned.owners
        else planned
        for planned in case.plan.overrides
    )
    patches = tuple(planned for planned in case.plan.patches if planned.owner != feature)
    verdict = verify(replace(case, plan=replace(case.plan, overrides=overrides, patches=patches)), pool)
    assert failing(verdict) == [f"effect of {feature}: the configuration of the model equals the baseline's"]


def idle(case: VerificationCase, feature: str) -> VerificationCase:
    """The question with a feature that forgets its patches, arguments and specifications of layers."""
    plan = case.plan
    patches = tuple(p for p in plan.patches if p.owner != feature and "get_block_submodules" not in str(p.patch.value))
    overrides = tuple(planned for planned in plan.overrides if feature not in planned.owners)
    return replace(case, plan=replace(plan, patches=patches, overrides=overrides))


@pytest.mark.cover(1, of=(), because="calls of operators are counted by one function: the default run has one")
@pytest.mark.parametrize("feature", each_long_but(1, ((name,) for name in OPERATORS)))
@pytest.mark.guards(16, processes=True)
def test_an_operator_feature_that_forgets_its_work_fails(pool: WorkerPool, feature: str) -> None:
    verdict = verify(idle(asked(feature), feature), pool)
    assert f"effect of {feature}: the operator {', '.join(OPERATORS[feature])} was not called" in failing(verdict)


@pytest.mark.parametrize(
    ("feature", "target", "fault"),
    each_long_but(
        1,
        [
            ("swiglu", "megatron.core.fusions.fused_bias_swiglu:bias_swiglu_impl", "plain_swiglu"),
            ("rms-norm", "mindspeed.features.rms_norm.layers:with_operator_norms", "nothing_changed"),
        ],
    ),
)
@pytest.mark.guards(16, processes=True)
def test_an_operator_feature_whose_glue_is_broken_fails(pool: WorkerPool, feature: str, target: str, fault: str) -> None:
    verdict = verify(planted(asked(feature), target, fault), pool)
    assert failing(verdict) == [f"effect of {feature}: the operator {OPERATORS[feature][0]} was not called"]


@pytest.mark.long
@pytest.mark.guards(16, processes=True)
def test_a_feature_whose_hook_changes_nothing_fails_also_without_an_operator(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RmsNorm, "spec", replace(RmsNorm.spec, ops=()))
    assert verify(asked("rms-norm"), pool).holds
    verdict = verify(
        planted(asked("rms-norm"), "mindspeed.features.rms_norm.layers:with_operator_norms", "nothing_changed"), pool
    )
    assert failing(verdict) == ["effect of rms-norm: no patch target was called, and no hook changed anything"]


LINEAR = "mindspeed.features.coc.layers"
EXCHANGED = [
    ("coc", [f"{LINEAR}:CocColumnParallelLinear.products", f"{LINEAR}:CocRowParallelLinear.products"], "skipped"),
    ("pipe-experts", ["mindspeed.features.pipe_experts.spec:with_units"], "nothing_changed"),
]


@pytest.mark.parametrize(("feature", "targets", "fault"), each_long_but(0, EXCHANGED), ids=lambda value: str(value)[:12])
@pytest.mark.guards(16, processes=True)
def test_exchanged_layers_that_compute_as_megatrons_are_no_effect(
    pool: WorkerPool, feature: str, targets: list[str], fault: str
) -> None:
    case = asked(feature)
    for target in targets:
        case = planted(case, target, fault)
    algorithm = ", ".join(catalog(frozenset()).specs[feature].verify_with.algorithm)
    assert failing(verify(case, pool)) == [f"effect of {feature}: no function of {algorithm} was called"]


def test_a_group_of_one_rank_fails_alone(pool: WorkerPool) -> None:
    verdict = verify(build_case(["data-parallel"], nproc=1), pool)
    assert failing(verdict) == ["effect of data-parallel: the group of dp has one rank"]


def test_a_group_of_one_rank_is_a_row_beside_features_that_work(pool: WorkerPool) -> None:
    verdict = verify(build_case(["data-parallel", "rms-norm"], nproc=1), pool)
    assert verdict.holds
    assert ComparisonResult("idle of data-parallel: the group of dp has one rank", 0.0, 0.0, idle=True) in verdict.checks


def test_a_reached_patch_is_an_effect_where_arguments_are_the_baselines() -> None:
    """A feature with an argument that has Megatron's own value, and a wrap that works."""
    case = asked("async-ddp", {})
    overrides = tuple(replace(p, override=replace(p.override, value=False)) for p in case.plan.overrides)
    case = replace(case, plan=replace(case.plan, overrides=overrides))
    sizes = {"dp": 2}
    silent, working = RankResult(sizes=sizes), RankResult(sizes=sizes, reached={"async-ddp": {"megatron.core.optimizer:x": 3}})
    equal = "effect of async-ddp: the configuration of the model equals the baseline's"
    assert [check.what for check in missing_effects(case, [silent], [silent])] == [equal]
    assert list(missing_effects(case, [silent], [working])) == []


def test_the_command_exits_1_and_names_the_parameter(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = planted(asked("data-parallel"), REDUCE_GRADIENTS, "skipped")
    monkeypatch.setattr(case_module, "build_case", lambda *args: broken)
    monkeypatch.setattr(workers, "WorkerPool", lambda: nullcontext(pool))
    result = CliRunner().invoke(main, ["features", "verify", "data-parallel", "--json"])
    assert result.exit_code == 1
    verdict = json.loads(result.stdout)
    assert verdict.keys() == {"feature", "claim", "holds", "checks", "proof"}
    assert verdict["proof"].keys() == {"world", "sites_reached", "bytes", "formula", "note", "host_reads", "communicators"}
    assert not verdict["holds"]
    assert f"gradient of {QKV}" in [
        check["what"] for check in verdict["checks"] if check["largest_difference"] > check["tolerance"]
    ]


@pytest.mark.long
def test_the_command_exits_0_and_prints_the_worst_of_each_kind(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WorkerPool", lambda: nullcontext(pool))
    result = CliRunner().invoke(main, ["features", "verify", "sequence-parallel", "--features", "tensor-parallel"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["loss", "input", "gradient", "weight"]
    assert lines[5] == "sizes: world_size 2, tp 2, pp 1, cp 1, dp 1, ep 1, vpp 1"
    assert lines[-1] == "sequence-parallel: reordered holds"


def test_a_rank_that_dies_is_named_and_the_next_job_has_other_workers(pool: WorkerPool) -> None:
    case = planted(asked("data-parallel"), f"{FINALIZE}:finalize_model_grads", "sudden_death")
    with pytest.raises(RunError, match="MS604 verification rank 1 ended with signal 9; the others were stopped"):
        verify(case, pool)
    assert verify(asked("rms-norm"), pool).holds


def test_a_rank_that_raises_is_named_with_its_error(pool: WorkerPool) -> None:
    case = planted(asked("rms-norm"), f"{FINALIZE}:finalize_model_grads", "error")
    with pytest.raises(RunError, match="MS607 verification rank 0 failed: RuntimeError: a planted error"):
        verify(case, pool)
    assert verify(asked("rms-norm"), pool).holds


def test_the_steps_of_a_verification_are_told_before_they_begin(pool: WorkerPool) -> None:
    told: list[str] = []
    verify(asked("data-parallel"), pool, told.append)
    baseline, feature, comparison = told
    assert baseline == "baseline: 5 steps of gpt on 1 process"
    assert feature == "data-parallel: 5 steps of gpt on 2 processes"
    assert comparison == "comparing losses, gradients and weights"


def test_an_equal_baseline_runs_once(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    first = asked("tensor-parallel")
    pool.run_once(first.baseline, first.recipe, 1)
    runs: list[int] = []
    monkeypatch.setattr(pool, "run", lambda plan, recipe, size: runs.append(size) or [])
    case = asked("pipeline-parallel")
    assert pool.run_once(case.baseline, case.recipe, 1)
    assert runs == []
