"""Modules of `mindspeed.nn` on one process: torch's results, and torch's conventions."""

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed import nn as own
from mindspeed.ops.errors import OperatorError

B, S, N, K, D, H = 2, 8, 4, 2, 16, 16
RUNS = (
    ("RMSNorm", {"normalized_shape": H}, [(B, S, H)]),
    ("SwiGLU", {}, [(B, S, H)]),
    ("RotaryEmbedding", {"dim": D, "max_positions": S}, [(B, S, N, D)]),
    ("Attention", {"window": 3}, [(B, S, N, D), (B, S, K, D), (B, S, K, D)]),
    ("LinearCrossEntropyLoss", {"in_features": H, "num_classes": 24, "chunks": 3}, [(B, S, H), "labels"]),
    ("MoE", {"hidden_size": H, "ffn_size": 24, "experts": 4, "top_k": 2, "shared_size": 8}, [(B, S, H)]),
)


def inputs(shapes: list[Any]) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(24, (B, S)) if shape == "labels" else torch.randn(shape, requires_grad=True) for shape in shapes]


def assert_like(result: Tensor, expected: Tensor, tensors: list[Tensor]) -> None:
    """The result, and the gradients of some tensors for the same gradient of it."""
    torch.testing.assert_close(result, expected)
    towards = torch.randn_like(expected)
    pairs = zip(*(torch.autograd.grad(x, tensors, towards) for x in (result, expected)), strict=True)
    for found, right in pairs:
        torch.testing.assert_close(found, right)


def test_norm_is_that_of_torch() -> None:
    (x,) = inputs([(B, S, H)])
    norm, torchs = own.RMSNorm(H, eps=1e-3), nn.RMSNorm(H, eps=1e-3)
    nn.init.normal_(norm.weight)
    torchs.load_state_dict(norm.state_dict())
    assert_like(norm(x), torchs(x), [x])


def visible(**keywords: Any) -> Tensor:
    """True where a query sees a key, [B, 1, S, S]."""
    i = torch.arange(S)
    seen = (i[None, :] <= i[:, None]) & (i[:, None] - i[None, :] < keywords.get("window", S))
    numbers = torch.tensor(
        [[sum(end <= token for end in row) for token in range(S)] for row in keywords.get("ends", [[S]] * B)]
    )
    return (seen & (numbers[:, :, None] == numbers[:, None, :]))[:, None]


@pytest.mark.parametrize(
    "keywords",
    [{}, {"window": 3}, {"ends": [[3, S], [1, 5, S]]}, {"slopes": own.alibi_slopes(N)}, {"ends": [[3, S], [S]], "window": 2}],
)
def test_attention_is_that_of_torch(keywords: dict[str, Any]) -> None:
    query, key, value = tensors = inputs([(B, S, N, D), (B, S, K, D), (B, S, K, 12)])
    distance = (torch.arange(S)[:, None] - torch.arange(S)).abs()
    bias = torch.zeros(1, 1, 1, 1) if "slopes" not in keywords else -keywords["slopes"][:, None, None] * distance
    mask = bias.expand(B, N, S, S).masked_fill(~visible(**keywords), -torch.inf)
    q, k, v = (x.transpose(1, 2) for x in tensors)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    assert_like(own.attention(query, key, value, **keywords), expected, tensors)


def test_attention_drops_in_training_alone() -> None:
    tensors = inputs([(B, S, N, D)] * 3)
    module = own.Attention(dropout=0.5)
    assert not torch.equal(module(*tensors), module(*tensors))
    assert torch.equal(module.eval()(*tensors), own.attention(*tensors))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_rotates_by_the_position(interleaved: bool) -> None:
    (x,) = inputs([(B, S, N, D)])
    rope = own.RotaryEmbedding(D, 2 * S, interleaved=interleaved)
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else torch.stack(x.chunk(2, -1), -1)
    angles = torch.outer(torch.arange(S), 10000.0 ** -(torch.arange(0, D, 2) / D))
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()), angles)[:, None])
    expected = turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), -1)
    assert_like(rope(x), expected, [x])
    shift = torch.arange(3, 3 + S)
    longer = torch.cat((x.new_zeros(B, 3, N, D), x), 1)
    assert torch.equal(rope(x, shift), rope(longer)[:, 3:])
    assert torch.equal(rope(x, shift.expand(B, S)), rope(x, shift))


def test_rotary_tables_remain_exact_in_another_type_and_after_meta() -> None:
    tables = own.RotaryEmbedding(D, S).cos
    assert torch.equal(own.RotaryEmbedding(D, S).bfloat16().cos, tables)
    rope = own.RotaryEmbedding(D, S, device="meta").to_empty(device="cpu")
    rope.reset_parameters()
    assert torch.equal(rope.cos, tables)


@pytest.mark.parametrize("mode", ["recompute", "accumulate"])
@pytest.mark.parametrize(
    "keywords", [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 5}, {"reduction": "none"}], ids=str
)
def test_loss_is_that_of_torch(mode: Any, keywords: dict[str, Any]) -> None:
    hidden, target = inputs([(B, S, H), "labels"])
    target[0, :3] = 5
    loss = own.LinearCrossEntropyLoss(H, 24, chunks=3, mode=mode, **keywords)
    expected = F.cross_entropy(loss.linear(hidden).flatten(0, 1), target.flatten(), **keywords)
    found = loss(hidden, target)
    tensors = [hidden, loss.linear.weight]
    if keywords.get("reduction") == "none":
        found, expected = found.sum(), expected.sum()
    assert_like(found, expected, tensors)
    assert list(loss.state_dict()) == ["linear.weight"]


class FewerExperts(nn.Module):
    """A router that gives a token one expert or two."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probs = x[:, :4].softmax(-1)
        chosen = (probs == probs.amax(-1, keepdim=True)) | (probs > 0.4)
        return probs * chosen, chosen


@pytest.mark.parametrize("router", [None, FewerExperts()])
def test_mixture_is_the_weighted_sum_of_its_experts(router: Any) -> None:
    (x,) = inputs([(B * S, H)])
    moe = own.MoE(H, 24, 4, 2, shared_size=8, router=router)
    probs, chosen = moe.router(x)
    halves = [(x @ up).chunk(2, -1) for up in moe.up]
    outputs = [(F.silu(a) * b) @ down for (a, b), down in zip(halves, moe.down, strict=True)]
    expected = sum(probs[:, e, None] * chosen[:, e, None] * y for e, y in enumerate(outputs)) + moe.shared(x)
    assert_like(moe(x), expected, [x, *moe.parameters()])


@pytest.mark.parametrize(("name", "keywords", "shapes"), RUNS, ids=[name for name, *_ in RUNS])
def test_module_keeps_the_conventions_of_torch(name: str, keywords: dict[str, Any], shapes: list[Any]) -> None:
    torch.manual_seed(2)
    module = getattr(own, name)(**keywords)
    tensors = inputs(shapes)
    result = module(*tensors)
    assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(module)))(*tensors), result)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")(*tensors)
    torch.testing.assert_close(compiled, result)
    checkpointed = torch.utils.checkpoint.checkpoint(module, *tensors, use_reentrant=False)
    leaves = [tensors[0], *module.parameters()]
    for output in (compiled, checkpointed):
        for found, right in zip(
            *(torch.autograd.grad(x.sum(), leaves, retain_graph=True) for x in (output, result)), strict=True
        ):
            torch.testing.assert_close(found, right)
    with torch.autocast("cpu", torch.bfloat16):
        low = module(*tensors)
    torch.autograd.grad(low.sum(), leaves)
    torch.testing.assert_close(low.float(), result, rtol=0.05, atol=0.05)
    if list(module.parameters()):
        made = getattr(own, name)(**keywords, device="meta", dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in made.parameters()} == {torch.bfloat16}
        assert {key: value.shape for key, value in made.state_dict().items()} == {
            key: value.shape for key, value in module.state_dict().items()
        }


@pytest.mark.parametrize(
    ("call", "sentence", "fix"),
    [
        (
            lambda: own.RotaryEmbedding(D, 4)(torch.randn(1, 6, 1, D)),
            "RotaryEmbedding: the sequence has 6 tokens, but max_positions is 4",
            "RotaryEmbedding(..., max_positions=6)",
        ),
        (
            lambda: own.attention(*[torch.randn(2, 8, 2, 4)] * 3, ends=[[8], [7]]),
            "attention: the documents end at [8, 7], but the batch has 2 rows of 8 tokens and 8 keys",
            "give for each of the 2 rows ends of which the last is 8",
        ),
        (
            lambda: own.attention(*[torch.randn(2, 8, 2, 4)] * 3, causal=False, window=2),
            "attention: window is 2 with causal=False",
            "give a window of 1 or more with causal=True",
        ),
        (lambda: own.MoE(8, 8, 4, 5), "TopKRouter: top_k is 5, but there are 4 experts", "use a top_k of 1 to 4"),
        (
            lambda: own.MoE(8, 8, 4, 2, chunks=3),
            "MoE: 4 experts of a rank are not divisible by 3 chunks",
            "use 3 or 6 experts of a rank, or fewer chunks",
        ),
    ],
)
def test_error_names_the_number_that_would_do(call: Any, sentence: str, fix: str) -> None:
    with pytest.raises(OperatorError) as error:
        call()
    (problem,) = error.value.problems
    assert (problem.code, problem.message, problem.fix_text) == ("MS505", sentence, fix)


_COST = """
import time, torch
start = time.process_time()
import mindspeed.nn
print(time.process_time() - start)
"""


def test_the_package_adds_less_than_50_ms_to_torch() -> None:
    done = subprocess.run([sys.executable, "-c", _COST], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 0.05
