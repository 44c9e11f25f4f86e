"""Every rule of Megatron's layers that a configuration alone can break is refused before the start, or needs no refusal."""

import ast
from collections.abc import Iterator
from pathlib import Path

import megatron.core

from mindspeed.workbench.lint.traps import known_traps

CORE = Path(megatron.core.__path__[0])
FOLDERS = ("transformer", "models/common", "models/gpt", "optimizer", "ssm", "fusions", "pipeline_parallel", "tensor_parallel")
JUDGED_BEFORE = ("transformer_config.py",)
"""Modules whose rules `check` evaluates itself."""

TRAPS = {
    "transformer/mlp.py": {"self.config.add_bias_linear is True": "experts-with-a-fused-gelu"},
    "transformer/moe/experts.py": {
        "not (self.config.add_bias_linear and config.bias_dropout_fusion)": "grouped-experts-with-fused-dropout",
        "self.config.moe_router_topk == 1": "weighed-inputs-of-several-experts",
    },
    "transformer/moe/router.py": {"self.config.moe_aux_loss_coeff == 0": "sinkhorn-with-an-auxiliary-loss"},
    "transformer/moe/shared_experts.py": {"config.add_bias_linear == False": "shared-experts-with-biases"},
    "transformer/multi_token_prediction.py": {"self.config.recompute_num_layers == 1": "predictions-recomputed-in-groups"},
    "models/gpt/experimental_attention_variant_module_specs.py": {
        "config.multi_latent_attention": "sparse-attention-without-a-layer",
        "config.qk_l2_norm is False": "latent-attention-with-an-l2-norm",
        "config.transformer_impl == 'transformer_engine'": "experimental-attention-of-local-layers",
    },
}
"""Traps by the rules that they stand for."""

LEGACY = "without the package grouped_gemm these experts are refused"
INFERENCE = "inference alone comes here"
ARGUMENTS = "a rule of the arguments or the configuration, which `check` judges, is the same"
DERIVED = "Megatron-LM's arguments always give this value"
ENGINE = "without Transformer Engine the platform refuses it"
OWN_CALL = "only the code behind the option calls it"
NORM = "the platform or a feature provides the norm"
REASONS = {
    "transformer/attention.py": {
        "self.config.kv_channels is not None": DERIVED,
        "self.config.num_query_groups is not None": DERIVED,
        "self.config.virtual_pipeline_model_parallel_size is None": INFERENCE,
        "not self.config.qk_clip": OWN_CALL,
        "self.config.num_query_groups != self.config.num_attention_heads": OWN_CALL,
        "not self.config.attention_output_gate": OWN_CALL,
    },
    "transformer/cuda_graphs.py": {
        "config.cuda_graph_impl == 'local'": OWN_CALL,
        "config.cuda_graph_impl == 'transformer_engine'": OWN_CALL,
    },
    "transformer/dot_product_attention.py": {"self.config.context_parallel_size == 1": "context parallelism needs a feature"},
    "transformer/moe/experts.py": {
        "config.add_bias_linear == False": LEGACY,
        "config.moe_latent_size is None": LEGACY,
        "self.config.bf16": LEGACY,
        "self.config.activation_func not in (F.silu, F.gelu)": LEGACY,
    },
    "transformer/moe/shared_experts.py": {
        "self.config.moe_shared_expert_overlap": OWN_CALL,
        "self.config.add_bias_linear is True": "shared experts have no biases",
    },
    "transformer/moe/token_dispatcher.py": {
        "self.config.moe_shared_expert_overlap": OWN_CALL,
        "config.num_moe_experts is not None": OWN_CALL,
        "self.config.moe_expert_capacity_factor is not None": ARGUMENTS,
    },
    "transformer/multi_latent_attention.py": {
        "not self.config.qk_clip": OWN_CALL,
        "self.config.cache_mla_latents": INFERENCE,
    },
    "transformer/torch_norm.py": {
        "not config.layernorm_zero_centered_gamma": NORM,
        "not config.persist_layer_norm": NORM,
        "not config.sequence_parallel": NORM,
        "not config.memory_efficient_layer_norm": NORM,
    },
    "transformer/transformer_block.py": {
        "not (config.account_for_embedding_in_pipeline_split or config.account_for_loss_in_pipeline_split)": ARGUMENTS,
        "self.config.cpu_offloading is False": ENGINE,
    },
    "transformer/transformer_layer.py": {"not self.config.overlap_moe_expert_parallel_comm": ARGUMENTS},
    "optimizer/__init__.py": {"config.decoupled_weight_decay": DERIVED},
    "optimizer/muon.py": {"config.use_distributed_optimizer": ARGUMENTS, "config.fp16": ARGUMENTS},
    "optimizer/optimizer.py": {"not self.config.fp16": DERIVED},
    "ssm/gated_delta_net.py": {"not self.config.sequence_parallel": INFERENCE},
    "ssm/mamba_block.py": {"self.config.virtual_pipeline_model_parallel_size is None": INFERENCE},
    "ssm/mamba_mixer.py": {"not self.config.sequence_parallel": INFERENCE},
    "fusions/fused_layer_norm.py": {"self.config.normalization == 'LayerNorm'": NORM},
    "pipeline_parallel/p2p_communication.py": {"config.pipeline_dtype is None": DERIVED},
    "pipeline_parallel/schedules.py": {
        "config.overlap_p2p_comm and config.batch_p2p_comm": DERIVED,
        "config.overlap_p2p_comm": DERIVED,
    },
    "tensor_parallel/layers.py": {"self.config.cpu_offloading is False": ENGINE},
}
"""Reasons why `check` need not refuse what breaks the other rules."""


def rules(path: Path) -> Iterator[str]:
    """Yield the assertions of a module, and the conditions of its errors, that read nothing but the configuration."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_error = isinstance(node, ast.If) and any(isinstance(inner, ast.Raise) for inner in node.body)
        if (isinstance(node, ast.Assert) or is_error) and _reads_the_configuration_alone(node.test):
            yield ast.unparse(node.test)


def _reads_the_configuration_alone(test: ast.expr) -> bool:
    values = [node for node in ast.walk(test) if isinstance(node, ast.Attribute) and node.attr != "config"]
    values = [node for node in values if ast.unparse(node.value) != "F"]
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    owners = {ast.unparse(node.value) for node in values}
    return bool(values) and owners <= {"config", "self.config"} and names <= {"config", "self", "F"}


def modules() -> Iterator[str]:
    """Yield the modules of the layers, of the optimizer and of the schedules."""
    paths = (path for folder in FOLDERS for path in sorted((CORE / folder).rglob("*.py")))
    for path in paths:
        if path.name not in JUDGED_BEFORE and "inference" not in path.name:
            yield str(path.relative_to(CORE))


def test_each_rule_is_a_trap_or_has_a_reason() -> None:
    known = {module: {*TRAPS.get(module, {}), *REASONS.get(module, {})} for module in modules()}
    assert {module: new for module, rows in known.items() if (new := {*rules(CORE / module)} - rows)} == {}


def test_the_tables_name_traps_and_rules_that_exist() -> None:
    names = {trap.name for trap in known_traps()}
    for module, rows in TRAPS.items():
        assert names >= {*rows.values()}, module
    for table in (TRAPS, REASONS):
        for module, rows in table.items():
            assert {*rules(CORE / module)} >= {*rows}, module
