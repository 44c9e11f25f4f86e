"""Core attentions with the bias, in Megatron's scores and in the operator, against the formula; the spec of a block."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed.features.alibi.feature import Alibi, AlibiArgs
from mindspeed.features.alibi.layers import attention_without_bias, with_position_bias
from mindspeed.features.flash_attention.feature import FlashAttentionArgs
from mindspeed.features.flash_attention.layers import with_flash_attention
from mindspeed.plugins import MindSpeedError, World

CAUSAL, NONE = AttnMaskType.causal, AttnMaskType.no_mask
HEADS, GROUPS, WIDTH, BATCH = 6, 2, 4, 2
SLOPES = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
"""Of six heads: those of four, and every second one of eight."""


@pytest.fixture(autouse=True)
def megatron_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Megatron's own core attention takes from its global state."""
    buffer = SimpleNamespace(get_tensor=lambda shape, dtype, name: torch.empty(shape, dtype=dtype))
    module = "megatron.core.transformer.dot_product_attention"
    monkeypatch.setattr(f"{module}.parallel_state.get_global_memory_buffer", lambda: buffer)
    monkeypatch.setattr(
        "megatron.core.fusions.fused_softmax.get_default_causal_mask", lambda n: torch.ones(n, n).triu(1).bool()
    )
    monkeypatch.setattr(f"{module}.tensor_parallel.get_cuda_rng_tracker", lambda: SimpleNamespace(fork=nullcontext))


def config(**values: Any) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
    return TransformerConfig(**sizes | {"attention_dropout": 0.0, "masked_softmax_fusion": False} | values)


def core_of(spec: Any) -> Any:
    return spec.layer_specs[0].submodules.self_attention.submodules.core_attention


def attention(
    kind: AttnMaskType = CAUSAL, ranks: int = 1, rank: int = 0, layer: int = 1, given: Any = None, **args: Any
) -> Any:
    """The core attention that a layer is built with, on one of some tensor-parallel ranks."""
    made = config(**given or {})
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: ranks, rank=lambda: rank))
    spec: Any = TransformerBlockSubmodules(layer_specs=[get_gpt_layer_local_spec()])
    settings = AlibiArgs(**args)
    spec = with_flash_attention(spec, FlashAttentionArgs()) if settings.fused else spec
    part = core_of(with_position_bias(spec, made, settings))
    return build_module(part, config=made, layer_number=layer, attn_mask_type=kind, attention_type="self", pg_collection=groups)


def tensors(queries: int, keys: int, heads: int = HEADS, groups: int = GROUPS, dtype: torch.dtype = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(queries)
    shapes = (queries, BATCH, heads, WIDTH), (keys, BATCH, groups, WIDTH), (keys, BATCH, groups, WIDTH)
    made = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.to(dtype).requires_grad_() for x in made]


def formula(q: Any, k: Any, v: Any, slopes: list[float], form: str, causal: bool) -> torch.Tensor:
    """Attention with the bias, from the paper's sentence; the last query stands at the last key."""
    rows, keys, times = q.shape[0], k.shape[0], q.shape[2] // k.shape[2]
    query, key = torch.arange(keys - rows, keys)[:, None].double(), torch.arange(keys).double()
    far = {"distance": -(query - key).abs(), "root": -(query - key).abs().sqrt(), "signed": key - query}[form]
    bias = torch.tensor(slopes, dtype=torch.float64)[:, None, None] * far
    scores = torch.einsum("sbnd,tbnd->bnst", q, k.repeat_interleave(times, 2)) * WIDTH**-0.5 + bias
    scores = scores.masked_fill(key > query, -torch.inf) if causal else scores
    return torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), v.repeat_interleave(times, 2)).flatten(2)


def assert_agrees(module: Any, inputs: Any, slopes: list[float], form: str, causal: bool, tolerance: float = 1e-6) -> None:
    """Values and gradients. Slopes are fp32 in the operator."""
    out, expected = module(*inputs, None), formula(*inputs, slopes, form, causal)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = (torch.autograd.grad(y, inputs, cotangent) for y in (out, expected))
    for ours, reference in zip(*grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)


WAYS = [{"fused": False}, {}, {"fused_type": 0}]


@pytest.mark.parametrize("args", WAYS, ids=str)
def test_causal_scores_have_the_slope_times_the_distance(args: dict[str, Any]) -> None:
    assert_agrees(attention(**args), tensors(7, 7), SLOPES, "distance", True)


@pytest.mark.parametrize("args", WAYS, ids=str)
def test_without_a_mask_later_keys_are_as_far_as_earlier_ones(args: dict[str, Any]) -> None:
    assert_agrees(attention(NONE, **args), tensors(5, 5), SLOPES, "distance", False)


@pytest.mark.parametrize("args", [{"fused": False, "fused_type": 3}, {"fused_type": 3}], ids=str)
def test_type_3_takes_the_root(args: dict[str, Any]) -> None:
    assert_agrees(attention(**args), tensors(7, 7), SLOPES, "root", True)


@pytest.mark.parametrize("setting", ["square", "opposite"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_signed_form_differs_only_for_later_keys(fused: bool, setting: str) -> None:
    args = {"fused": fused, setting: True}
    assert_agrees(attention(NONE, **args), tensors(5, 5), SLOPES, "signed", False)
    assert_agrees(attention(CAUSAL, **args), tensors(5, 5), SLOPES, "distance", True)


@pytest.mark.parametrize("fused", [False, True])
def test_filling_hides_later_keys_without_a_mask(fused: bool) -> None:
    assert_agrees(attention(NONE, fused=fused, fill=True), tensors(5, 5), SLOPES, "distance", True)


@pytest.mark.parametrize("args", [{}, {"fused_type": 0}], ids=str)
def test_more_keys_than_queries_are_those_before_them(args: dict[str, Any]) -> None:
    assert_agrees(attention(**args), tensors(3, 9), SLOPES, "distance", True)


@pytest.mark.parametrize("args", WAYS, ids=str)
def test_a_tensor_parallel_rank_has_the_slopes_of_its_heads(args: dict[str, Any]) -> None:
    for rank in range(2):
        given = {"tensor_model_parallel_size": 2}
        own = SLOPES[rank * 3 : rank * 3 + 3]
        assert_agrees(attention(ranks=2, rank=rank, given=given, **args), tensors(6, 6, 3, 1), own, "distance", True)


@pytest.mark.parametrize("args", WAYS, ids=str)
def test_scaling_by_layer_is_undone_for_the_bias_too(args: dict[str, Any]) -> None:
    given = {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}
    assert_agrees(attention(layer=2, given=given, **args), tensors(6, 6), SLOPES, "distance", True)


def test_a_long_matrix_has_its_last_rows_only() -> None:
    inputs = tensors(1030, 1030, dtype=torch.float32)
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        out = attention(fused_type=0)(*inputs, None)
    assert (1, HEADS, 1024, 1030) in kept
    exact = formula(*(x.detach().double() for x in inputs), SLOPES, "distance", True)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("args", [{"fused": False}, {}], ids=str)
def test_half_precision_has_the_bias_in_fp32(args: dict[str, Any]) -> None:
    """A bias of 450, rounded to bf16, would be up to 1 away."""
    inputs = tensors(900, 900, dtype=torch.bfloat16)
    out = attention(given={"bf16": True, "params_dtype": torch.bfloat16}, **args)(*inputs, None)
    assert out.dtype == torch.bfloat16
    exact = formula(*(x.detach().double() for x in inputs), SLOPES, "distance", True)
    torch.testing.assert_close(out.double(), exact, rtol=2.5e-2, atol=2.5e-2)


def test_packed_sequences_take_slopes_and_no_matrix() -> None:
    ends = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
    packed = [x.detach()[:, 0] for x in tensors(9, 9)]
    params = SimpleNamespace(cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None)
    out = attention()(*packed, None, packed_seq_params=params)
    documents = zip(*(x.split([4, 2, 3]) for x in packed), strict=True)
    expected = torch.cat([formula(*(x[:, None] for x in part), SLOPES, "distance", True) for part in documents])
    torch.testing.assert_close(out.flatten(1), expected[:, 0], rtol=1e-6, atol=1e-6)
    with pytest.raises(MindSpeedError) as error:
        attention(fused_type=0)(*packed, None, packed_seq_params=params)
    assert str(error.value) == (
        "MS304 flash-attention: packed sequences support a position bias from slopes, but not from a matrix\n"
        "  fix: --set alibi.fused_type=2, without square, opposite and fill"
    )


def test_the_given_spec_stays_and_its_parameters_are_kept() -> None:
    layer = get_gpt_layer_local_spec()
    core = layer.submodules.self_attention.submodules
    core.core_attention = ModuleSpec(DotProductAttention, {"attention_dropout": 0.25})
    given = TransformerBlockSubmodules(layer_specs=[layer] * 2)
    found = with_position_bias(given, config(), AlibiArgs(fused=False))
    assert found.layer_specs[0] is found.layer_specs[1]
    assert core_of(found).params.keys() == {"attention_dropout", "position_bias"}
    assert core.core_attention.params == {"attention_dropout": 0.25}


@pytest.mark.parametrize(("cp", "fused"), [(1, True), (1, False), (2, True)])
def test_a_core_attention_of_another_package_that_adds_no_bias_is_named(cp: int, fused: bool) -> None:
    feature = Alibi(AlibiArgs(fused=fused), World({"cp": cp}))
    local, other = get_gpt_layer_local_spec(), get_gpt_layer_local_spec()
    other.submodules.self_attention.submodules.core_attention = IdentityOp
    assert [*attention_without_bias(feature, TransformerBlockSubmodules(layer_specs=[local]), None)] == []
    assert [*attention_without_bias(feature, TransformerBlockSubmodules(layer_specs=[local, other]), None)] == [
        "the core attention of the model, megatron.core.transformer.identity_op.IdentityOp, cannot add a position bias"
    ]
