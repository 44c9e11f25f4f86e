"""The core attention module: every kind of mask, packed sequences, windows, scales, dropout and types, against the formula."""

import functools
import inspect
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed.features.flash_attention.feature import FlashAttention, FlashAttentionArgs
from mindspeed.features.flash_attention.layers import FlashCoreAttention, with_flash_attention
from mindspeed.ops.attention_mask import compressed_mask, forget_compressed_masks
from mindspeed.plugins import MindSpeedError, World
from tests.ops.attention_formula import dense, sight
from tests.ops.operator_checks import randn

LENGTH, BATCH, HEADS, GROUPS, WIDTH = 6, 2, 4, 2, 8
ALONE = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
CAUSAL, PADDING, NONE = AttnMaskType.causal, AttnMaskType.padding, AttnMaskType.no_mask


def config(**values):
    sizes = {"num_layers": 2, "hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
    return TransformerConfig(**sizes | {"attention_dropout": 0.0, "masked_softmax_fusion": False} | values)


def attention(kind=CAUSAL, args=None, layer=1, scale=None, **values):
    (made,) = with_flash_attention([DotProductAttention], FlashAttentionArgs(**args or {}))
    arguments = {"layer_number": layer, "attn_mask_type": kind, "attention_type": "self", "softmax_scale": scale}
    return build_module(made, config=config(**values), **arguments, pg_collection=ALONE)


def tensors(keys=LENGTH, width=WIDTH, dtype=torch.float64, queries=LENGTH):
    """Query, key and value as Megatron has them."""
    shapes = (queries, BATCH, HEADS, WIDTH), (keys, BATCH, GROUPS, WIDTH), (keys, BATCH, GROUPS, width)
    return [randn(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]


def formula(q, k, v, seen, scale=WIDTH**-0.5):
    out, *_ = dense(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), seen, scale=scale)
    return out.permute(2, 0, 1, 3).flatten(2)


def assert_agrees(module, seen, mask=None, inputs=None, scale=WIDTH**-0.5, **more):
    """Values and gradients."""
    inputs = inputs or tensors()
    out, expected = module(*inputs, mask, **more), formula(*inputs, seen, scale)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    cotangent = randn(*out.shape, seed=9, grad=False)
    grads = (torch.autograd.grad(y, inputs, cotangent) for y in (out, expected))
    for ours, reference in zip(*grads, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


def causal(queries=LENGTH, keys=LENGTH):
    return sight(3, queries, keys)


def everything(queries=LENGTH, keys=LENGTH):
    return torch.ones(queries, keys, dtype=torch.bool)


def some(batch=BATCH):
    """A mask of Megatron's, True hidden."""
    mask = torch.rand(batch, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.4
    mask[..., 0] = False  # every query sees a key
    return mask


def test_causal_attention_needs_no_mask():
    assert_agrees(attention(), causal())


def test_more_keys_than_queries_are_those_before_them():
    assert_agrees(attention(), causal(LENGTH, 9), inputs=tensors(keys=9))
    assert_agrees(attention(), everything(1, 9), inputs=tensors(queries=1, keys=9))


@pytest.mark.parametrize("kind", [CAUSAL, PADDING, NONE])
@pytest.mark.parametrize("batch", [1, BATCH])
def test_a_given_mask_says_what_is_seen_and_nothing_else_does(kind, batch):
    mask = some(batch)
    assert_agrees(attention(kind), ~mask, mask)


def test_a_mask_of_padded_keys_is_for_all_queries():
    mask = some()[:, :, :1]
    assert_agrees(attention(PADDING), ~mask, mask)


@pytest.mark.parametrize("kind", [PADDING, NONE])
def test_without_a_mask_other_kinds_see_everything(kind):
    assert_agrees(attention(kind), everything())


def test_the_kind_of_a_call_wins_over_that_of_the_layer():
    assert_agrees(attention(CAUSAL), everything(), attn_mask_type=NONE)


@pytest.mark.parametrize("mask", [None, some()])
def test_a_window_of_the_model_is_for_its_layers_and_no_mask_is_read(mask):
    windows = {"window_size": (2, 0), "window_attn_skip_freq": 2}
    assert_agrees(attention(layer=1, **windows), sight(4, LENGTH, LENGTH, 2, 0), mask)
    assert_agrees(attention(layer=2, **windows), causal() if mask is None else ~mask, mask)


@pytest.mark.parametrize(
    ("args", "seen"),
    [
        ({"sparse_mode": 2}, sight(2, LENGTH, 9)),
        ({"sparse_mode": 3}, sight(3, LENGTH, 9)),
        ({"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 1}, sight(4, LENGTH, 9, 3, 1)),
    ],
)
def test_a_sparse_mode_that_reads_no_mask_wins_over_the_given_one(args, seen):
    mask = torch.rand(1, 1, LENGTH, 9) < 0.5
    assert_agrees(attention(args=args), seen, mask, inputs=tensors(keys=9))


def test_sparse_mode_0_is_the_mask_within_the_window():
    mask = some(1)
    seen = sight(0, LENGTH, LENGTH, 2, 0, mask=mask[0, 0])
    assert_agrees(attention(args={"sparse_mode": 0, "pre_tokens": 2}), seen, mask)


@pytest.mark.parametrize("mode", [0, 1])
def test_modes_of_a_mask_without_one_see_what_the_kind_says(mode):
    assert_agrees(attention(args={"sparse_mode": mode}), causal())


def test_no_mode_is_for_layers_that_have_no_mask():
    assert_agrees(attention(NONE, {"sparse_mode": 2}), everything())


def test_the_scale_is_the_given_one_or_follows_from_the_width():
    assert_agrees(attention(scale=0.3), causal(), scale=0.3)


def test_scaling_by_layer_is_undone_as_in_megatron():
    scaled = {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}
    assert_agrees(attention(layer=2, **scaled), causal())


def test_the_value_may_have_another_width():
    assert_agrees(attention(), causal(), inputs=tensors(width=12))


@pytest.mark.parametrize("kind", [CAUSAL, AttnMaskType.padding_causal, NONE])
def test_packed_sequences_do_not_see_one_another(kind):
    lengths = [4, 0, 2, 3]
    ends = torch.tensor([0, 4, 4, 6, 9], dtype=torch.int32)
    shapes = (9, HEADS, WIDTH), (9, GROUPS, WIDTH), (9, GROUPS, WIDTH)
    packed = [randn(*shape, seed=n) for n, shape in enumerate(shapes)]
    params = SimpleNamespace(cu_seqlens_q=ends, cu_seqlens_kv=ends, qkv_format="thd")
    out = attention(kind)(*packed, None, attn_mask_type=kind, packed_seq_params=params)
    parts = zip(*(x.split(lengths) for x in packed), strict=True)
    see = everything if kind == NONE else causal
    expected = torch.cat([formula(*(x[:, None] for x in part), see(n, n)) for n, part in zip(lengths, parts, strict=True)])
    torch.testing.assert_close(out.flatten(1), expected[:, 0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("args", [{}, {"sparse_mode": 0}], ids=str)
def test_documents_of_rows_do_not_see_one_another(args):
    documents = torch.tensor([[1, 4, LENGTH], [LENGTH] * 3])
    numbers = [torch.bucketize(torch.arange(LENGTH), row.unique(), right=True) for row in documents]
    together = torch.stack([number[:, None] == number for number in numbers])[:, None]
    assert_agrees(attention(args=args), causal() & together, mask=documents)


def test_padding_behind_packed_sequences_is_refused_where_it_would_be_seen():
    ends, padded = (torch.tensor(row, dtype=torch.int32) for row in ([0, 3, 5], [0, 4, 8]))
    starts = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    packed = [randn(8, heads, WIDTH, seed=1) for heads in (HEADS, GROUPS, GROUPS)]
    params = SimpleNamespace(**starts, qkv_format="thd")
    with pytest.raises(MindSpeedError) as refused:
        attention(NONE)(*packed, None, attn_mask_type=NONE, packed_seq_params=params)
    assert str(refused.value) == (
        "MS337 flash-attention: packed sequences contain padding, which non-causal attention would include\n"
        "  fix: give packed sequences without padding"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_stay_and_sums_are_wide(dtype):
    inputs = tensors(dtype=dtype)
    out = attention()(*inputs, None)
    assert out.dtype == dtype
    exact = formula(*(x.detach().double() for x in inputs), causal())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def test_dropout_is_for_training_alone_and_drops_its_share(monkeypatch):
    module = attention(attention_dropout=0.5, sequence_parallel=True, tensor_model_parallel_size=2)
    inputs = tensors()
    torch.manual_seed(1)
    dropped = module(*inputs, None)
    assert not torch.equal(dropped, module(*inputs, None))
    torch.manual_seed(1)
    assert torch.equal(dropped, module(*inputs, None))
    torch.testing.assert_close(module.eval()(*inputs, None), formula(*inputs, causal()))


def test_without_sequence_parallelism_dropout_draws_from_the_random_state_of_its_rank(monkeypatch):
    forks = []

    class Tracker:
        def fork(self):
            forks.append(1)
            return torch.random.fork_rng([])

    monkeypatch.setattr("mindspeed.features.flash_attention.layers.get_cuda_rng_tracker", Tracker)
    attention(attention_dropout=0.5)(*tensors(), None)
    attention(attention_dropout=0.0)(*tensors(), None)
    attention(attention_dropout=0.5).eval()(*tensors(), None)
    assert forks == [1]


def test_a_bias_of_the_scores_is_refused():
    with pytest.raises(MindSpeedError) as error:
        attention()(*tensors(), None, attention_bias=torch.zeros(1))
    assert str(error.value) == (
        "MS304 flash-attention: the model adds a bias to its attention scores\n  fix: remove flash-attention"
    )


def test_no_matrix_of_the_length_of_the_sequence_is_kept():
    saved = []
    q, k, v = (torch.randn(3000, 1, heads, 8, requires_grad=True) for heads in (2, 1, 1))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        attention(num_attention_heads=2, num_query_groups=1, hidden_size=16)(q, k, v, None)
    assert max(t.numel() for t in saved) == compressed_mask(q.device).numel() < 3000 * 3000


def test_the_mask_of_all_layers_is_one_and_may_be_first_used_in_inference():
    forget_compressed_masks()
    with torch.inference_mode():
        attention()(*(x.detach() for x in tensors()), None)
        made = compressed_mask(torch.device("cpu"))
    assert_agrees(attention(), causal())
    assert compressed_mask(torch.device("cpu")) is made


def test_local_core_attention_of_a_spec_is_exchanged_and_the_given_spec_is_not():
    layer = get_gpt_layer_local_spec()
    given = TransformerBlockSubmodules(layer_specs=[layer] * 2)
    changed = with_flash_attention(given, FlashAttentionArgs(sparse_mode=2))
    core = changed.layer_specs[0].submodules.self_attention.submodules.core_attention
    assert (core.module, core.params["settings"].sparse_mode) == (FlashCoreAttention, 2)
    assert changed.layer_specs[0] is changed.layer_specs[1]
    assert layer.submodules.self_attention.submodules.core_attention is DotProductAttention


def test_a_patch_of_somebody_else_on_the_forward_wins(monkeypatch):
    original = DotProductAttention.forward

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    monkeypatch.setattr(DotProductAttention, "forward", forward)
    given = [DotProductAttention]
    assert with_flash_attention(given, FlashAttentionArgs()) is given
    monkeypatch.undo()
    assert with_flash_attention(given, FlashAttentionArgs()) is not given


def test_under_context_parallelism_the_outer_attention_is_the_algorithms():
    given = TransformerBlockSubmodules(layer_specs=[get_gpt_layer_local_spec()])
    alone, spread = (FlashAttention(FlashAttentionArgs(), World({"cp": size})).layer_spec(given, None) for size in (1, 2))
    assert spread is given
    assert alone is not given


def test_it_takes_what_megatrons_module_takes():
    ours, theirs = (inspect.signature(module.forward).parameters for module in (FlashCoreAttention, DotProductAttention))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]
