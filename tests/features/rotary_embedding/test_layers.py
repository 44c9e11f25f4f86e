"""The stand-in against Megatron's own function: every option, both gradients, and the tables that calls share."""

import inspect

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed.features.rotary_embedding import layers
from mindspeed.features.rotary_embedding.layers import apply_rotary

megatrons = rope_utils._apply_rotary_pos_emb_bshd
OPTIONS = [{}, {"rotary_interleaved": True}, {"multi_latent_attention": True}, {"mscale": 1.3}]
ROTATED = 8


def angles(length=6, batch=1, width=ROTATED):
    half = torch.randn(length, batch, 1, width // 2, generator=torch.Generator().manual_seed(3))
    return torch.cat((half, half), -1)


def values_and_gradient(function, x, freqs, **options):
    x = x.detach().clone().requires_grad_()
    y = function(x, freqs, **options)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    return y, x.grad


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("width", [ROTATED, 12])
@pytest.mark.parametrize("batch", [1, 2])
def test_it_is_megatrons_function(options, width, batch):
    x, freqs = torch.randn(6, 2, 3, width), angles(batch=batch)
    results = [values_and_gradient(function, x, freqs, **options) for function in (apply_rotary, megatrons)]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_half_precision_is_closer_to_the_wide_result_than_megatrons(options, dtype, tolerance):
    x, freqs = torch.randn(64, 2, 4, ROTATED).to(dtype), angles(64)
    exact = megatrons(x.double(), freqs.double(), **options)
    ours, theirs = (function(x, freqs, **options) for function in (apply_rotary, megatrons))
    assert ours.dtype == dtype
    error, other = ((y.double() - exact).abs().mean() for y in (ours, theirs))
    assert error < other
    torch.testing.assert_close(ours.double(), exact, rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("options", [{}, {"rotary_interleaved": True}], ids=str)
def test_the_inverse_rotates_back(options):
    x, freqs = torch.randn(6, 2, 3, 12), angles()
    if options:
        freqs = torch.stack(freqs.chunk(2, -1), -1).flatten(-2)
    back = apply_rotary(apply_rotary(x, freqs, **options), freqs, inverse=True, **options)
    torch.testing.assert_close(back, x, rtol=1e-6, atol=1e-6)
    assert not torch.equal(apply_rotary(x, freqs, inverse=True, **options), apply_rotary(x, freqs, **options))


def test_pairs_of_neighbours_can_return_to_their_places():
    x, freqs, latent = torch.randn(6, 2, 3, 12), angles(), {"mla_rotary_interleaved": True}
    halves = apply_rotary(x, freqs, **latent)[..., :ROTATED]
    pairs = apply_rotary(x, freqs, mla_output_remove_interleaving=True, **latent)
    assert torch.equal(pairs[..., :ROTATED:2], halves[..., : ROTATED // 2])
    assert torch.equal(pairs[..., 1:ROTATED:2], halves[..., ROTATED // 2 :])
    assert torch.equal(pairs[..., ROTATED:], x[..., ROTATED:])


def test_angles_may_have_a_head_dimension_that_the_input_lacks():
    x, freqs = torch.randn(6, 2, ROTATED), angles()
    assert torch.equal(apply_rotary(x, freqs), apply_rotary(x[:, :, None], freqs)[:, :, 0])


def test_packed_sequences_start_anew_as_in_megatron(monkeypatch):
    class Alone:
        size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)

    x, ends, freqs = torch.randn(9, 3, 12), torch.tensor([0, 4, 4, 9], dtype=torch.int32), angles(5)
    config = TransformerConfig(num_layers=1, hidden_size=36, num_attention_heads=3)

    def packed(t):
        return rope_utils.apply_rotary_pos_emb(t, freqs, config, cu_seqlens=ends, cp_group=Alone)

    theirs = packed(x)
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_bshd", apply_rotary)
    torch.testing.assert_close(packed(x), theirs, rtol=1e-6, atol=1e-6)


def test_it_takes_what_megatrons_function_takes():
    """By name in every release, and in Megatron's order: the fourth was renamed in Megatron 0.19."""
    ours, theirs = (list(inspect.signature(f).parameters.values()) for f in (apply_rotary, megatrons))
    assert [p.default for p in ours[: len(theirs)]] == [p.default for p in theirs]
    assert {p.name for p in theirs} <= {p.name for p in ours}
    assert [p.name for p in ours[: len(theirs)] if p.name not in ("mla_rotary_interleaved", theirs[3].name)] == [
        p.name for p in theirs if p.name != theirs[3].name
    ]


def test_queries_and_keys_of_all_layers_keep_one_table():
    saved = []
    freqs = angles()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        for _ in range(4):
            apply_rotary(torch.randn(6, 2, 3, ROTATED, requires_grad=True), freqs)
    assert len({t.data_ptr() for t in saved}) == 2
    assert all(t.numel() == freqs.numel() for t in saved)


def test_tables_follow_changed_angles_other_types_and_other_scales():
    x, freqs = torch.randn(6, 2, 3, ROTATED), angles()
    apply_rotary(x, freqs)
    for change in ({"mscale": 2.0}, {}):
        torch.testing.assert_close(apply_rotary(x, freqs, **change), megatrons(x, freqs, **change))
    freqs.add_(1)
    torch.testing.assert_close(apply_rotary(x, freqs), megatrons(x, freqs))
    assert apply_rotary(x.bfloat16(), freqs).dtype == torch.bfloat16


def test_tables_of_inference_are_not_used_in_training():
    freqs = angles()
    with torch.inference_mode():
        apply_rotary(torch.randn(6, 2, 3, ROTATED), freqs)
        own = angles()
        apply_rotary(torch.randn(6, 2, 3, ROTATED), own)
    x = torch.randn(6, 2, 3, ROTATED, requires_grad=True)
    apply_rotary(x, freqs).sum().backward()
    assert x.grad is not None


def test_tables_live_as_long_as_their_angles():
    freqs = angles()
    apply_rotary(torch.randn(6, 2, 3, ROTATED), freqs)
    assert freqs in layers._TABLES
    before = len(layers._TABLES)
    del freqs
    assert len(layers._TABLES) == before - 1


def test_angles_that_are_learned_get_their_gradient():
    x = torch.randn(6, 2, 3, ROTATED)
    grads = []
    for function in (apply_rotary, megatrons):
        freqs = angles().requires_grad_()
        function(x, freqs).square().sum().add(function(x, freqs)[..., :3].sum()).backward()
        grads.append(freqs.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_it_compiles_without_a_graph_break():
    torch.compiler.reset()
    x, freqs = torch.randn(6, 2, 3, ROTATED), angles()
    compiled = torch.compile(apply_rotary, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, freqs), apply_rotary(x, freqs))
