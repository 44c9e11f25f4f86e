"""Operators that communicate, on 1, 2 and 4 gloo processes, against one process that has all the inputs."""

import pytest
import torch
import torch.nn.functional as F

from tests.ops import communicating
from tests.ops.operator_checks import randn

WORLDS = [1, 2, pytest.param(4, marks=pytest.mark.long)]
GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2), *(pytest.param(*grid, marks=pytest.mark.long) for grid in [(4, 1), (1, 4)])]
MM = "npu_mm_all_reduce_add_rms_norm"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def tensor(*shape, seed=1, dtype=torch.float64):
    return randn(*shape, seed=seed, dtype=dtype, grad=False)


def int8(*shape, seed=1):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def assert_close(got, expected, dtype=torch.float64):
    torch.testing.assert_close(got.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def add_norm(mm, residual, gamma, eps=1e-6):
    y = mm.view(residual.shape).double() + residual.double()
    return y, y / (y.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gamma.double()


def mm_inputs(world, dtype):
    """x1 [2, 3, 4 world], cut by columns, x2 cut by rows, one bias per rank."""
    x1, x2 = tensor(2, 3, 4 * world, dtype=dtype), tensor(4 * world, 5, seed=2, dtype=dtype)
    residual, gamma = tensor(6, 1, 5, seed=3, dtype=dtype), tensor(5, seed=4, dtype=dtype)
    biases = [tensor(5, seed=10 + r, dtype=dtype) for r in range(world)]
    return x1.chunk(world, -1), x2.chunk(world), residual, gamma, biases


@pytest.mark.cover(1, because="every dtype is in the default run on one and two ranks")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", WORLDS)
def test_mm_all_reduce_add_rms_norm_and_its_in_place_variant(pool, world, dtype):
    x1, x2, residual, gamma, biases = mm_inputs(world, dtype)
    arguments = [[x1[r], x2[r], residual, gamma, "WORLD"] for r in range(world)]
    named = [[x1[r], x2[r], residual, gamma, "NAME"] for r in range(world)]
    biased = [{"bias": biases[r], "epsilon": 1e-3} for r in range(world)]
    cases = [(MM, arguments, None), (MM, named, biased), (f"{MM}_", arguments, biased)]
    product = torch.cat(x1, -1).double() @ torch.cat(x2).double()
    plain = add_norm(product, residual, gamma)
    expected = add_norm(product + sum(b.double() for b in biases), residual, gamma, 1e-3)
    for first, second, (y, norm, kept) in pool.call(communicating.calls, world, cases):
        assert first[0].dtype == first[1].dtype == dtype
        for got, wanted in zip((*first, *second, y, norm), (*plain, *expected, *expected), strict=True):
            assert_close(got, wanted, dtype)
        assert kept
        if dtype != torch.float64:
            assert torch.equal(first[0], plain[0].to(dtype))


@pytest.mark.parametrize("world", WORLDS)
def test_mm_all_reduce_add_rms_norm_with_integers(pool, world):
    x1, x2 = int8(6, 4 * world).chunk(world, -1), int8(4 * world, 5, seed=2).chunk(world)
    residual, gamma = tensor(6, 5, seed=3).bfloat16(), tensor(5, seed=4).bfloat16()
    bias, scale = torch.arange(5, dtype=torch.int32), torch.tensor([0.5, 0.25, 0.125, 1, 2])
    bits = scale.view(torch.int32).long()
    full = [{"bias": bias, "dequant_scale": bits if r % 2 else scale} for r in range(world)]
    wide, by_group = tensor(6, 4 * world).bfloat16().chunk(world, -1), tensor(2, 5, seed=6).bfloat16()
    pseudo = [{"antiquant_scale": by_group, "antiquant_offset": by_group, "antiquant_group_size": 2}] * world
    rest = [residual, gamma, "WORLD"]
    cases = [
        (MM, [[x1[r], x2[r], *rest] for r in range(world)], full),
        (MM, [[wide[r], x2[r], *rest] for r in range(world)], pseudo),
    ]
    product = (torch.cat(x1, -1).double() @ torch.cat(x2).double() + world * bias) * scale
    rows = by_group.double().repeat_interleave(2, 0).repeat(world, 1)
    dequantized = torch.cat(wide, -1).double() @ ((torch.cat(x2).double() + rows) * rows)
    for results in pool.call(communicating.calls, world, cases):
        for got, mm in zip(results, (product, dequantized), strict=True):
            for value, expected in zip(got, add_norm(mm, residual, gamma), strict=True):
                assert_close(value, expected, torch.bfloat16)


@pytest.mark.cover(1, because="every dtype is in the default run on one and two ranks")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", WORLDS)
def test_grouped_mat_mul_all_reduce(pool, world, dtype):
    name, sizes, ks = "npu_grouped_mat_mul_all_reduce", [2, 0, 3], [3, 1, 4]
    xs = [tensor(m, k * world, seed=m, dtype=dtype).chunk(world, -1) for m, k in zip(sizes, ks, strict=True)]
    ws = [tensor(k * world, 5, seed=k, dtype=dtype).chunk(world) for k in ks]
    whole = tensor(5, 2 * world, seed=7, dtype=dtype).chunk(world, -1)
    narrow = [tensor(2 * world, 5, seed=20 + i, dtype=dtype).chunk(world) for i in range(3)]
    biases = [tensor(5, seed=30 + i, dtype=torch.float64 if dtype == torch.float64 else torch.float32) for i in range(3)]
    separate = [[[x[r] for x in xs], [w[r] for w in ws], "WORLD"] for r in range(world)]
    one = [[[whole[r]], [w[r] for w in narrow], "WORLD"] for r in range(world)]

    def more(split, **given):
        return [{"split_item": split, "bias": biases, **given}] * world

    cases = [
        (name, separate, None),
        (name, separate, more(0)),
        (name, one, more(1, group_list=[2, 2, 5])),
        (name, separate, more(2)),
        (name, one, more(3, group_list=torch.tensor([2, 2, 5]))),
    ]
    plain = [torch.cat(x, -1).double() @ torch.cat(w).double() for x, w in zip(xs, ws, strict=True)]
    parts = torch.cat(whole, -1).double().split(sizes)
    cut = [x @ torch.cat(w).double() + b for x, w, b in zip(parts, narrow, biases, strict=True)]
    biased = [y + b for y, b in zip(plain, biases, strict=True)]
    expected = [plain, biased, cut, [torch.cat(biased)], [torch.cat(cut)]]
    for results in pool.call(communicating.calls, world, cases):
        for got, wanted in zip(results, expected, strict=True):
            assert isinstance(got, list)
            for y, reference in zip(got, wanted, strict=True):
                assert y.dtype == dtype
                assert_close(y, reference, dtype)


@pytest.mark.cover(1, because="every dtype is in the default run on one and two ranks")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", WORLDS)
def test_lcal_coc(pool, world, dtype):
    m, k, n = 4 * world, 3, 5
    rows, wide_rows = tensor(m, k, dtype=dtype), tensor(m, k * world, seed=2, dtype=dtype)
    weight, long_weight = tensor(k, n, seed=3, dtype=dtype), tensor(k * world, n, seed=4, dtype=dtype)
    bias = tensor(1, n, seed=5, dtype=dtype)
    x, parts, matrices = rows.chunk(world), wide_rows.chunk(world, -1), long_weight.chunk(world)

    def out(rows, columns=n):
        return torch.full((rows, columns), torch.nan, dtype=dtype)

    each = range(world)
    more = [{"bias": bias}] * world
    cases = [
        ("lcal_coc.pure_matmul", [[rows, weight, out(m)]] * world, more),
        ("lcal_coc.matmul_all_reduce", [[parts[r], matrices[r], out(m), "WORLD"] for r in each], more),
        ("lcal_coc.all_gather_matmul", [[x[r], weight, out(m), "WORLD"] for r in each], more),
        ("lcal_coc.all_gather_matmul_v2", [[x[r], weight, out(m), out(m, k), "NAME"] for r in each], None),
        ("lcal_coc.matmul_reduce_scatter", [[parts[r], matrices[r], out(m // world), "WORLD"] for r in each], more),
    ]
    whole, summed = rows.double() @ weight.double(), wide_rows.double() @ long_weight.double()
    for r, results in enumerate(pool.call(communicating.calls, world, cases)):
        mine = (summed + bias.double()).chunk(world)[r]
        expected = [[whole + bias.double()], [summed + bias.double()], [whole + bias.double()], [whole, rows], [mine]]
        for got, wanted in zip(results, expected, strict=True):
            for y, reference in zip(got, wanted, strict=True):
                assert y.dtype == dtype
                assert_close(y, reference, dtype)


@pytest.mark.parametrize(("gathering", "scattering"), GRIDS)
def test_lcal_coc_on_a_grid_of_ranks(pool, gathering, scattering):
    """Rank (g, s): rows are cut over g, the sum is cut over s; the gathering group is called EP here."""
    m, k, n = 4 * gathering * scattering, 3, 5
    x, weight = tensor(m, k * scattering), tensor(k * scattering, n, seed=2)
    bias = tensor(1, n, seed=3)
    arguments = [
        [
            x.chunk(gathering)[g].chunk(scattering, -1)[s],
            weight.chunk(scattering)[s],
            torch.empty(m // scattering, n, dtype=torch.float64),
            "EP",
            "TP",
        ]
        for g in range(gathering)
        for s in range(scattering)
    ]
    cases = [("lcal_coc.all_gather_matmul_reduce_scatter", arguments, [{"bias": bias}] * len(arguments))]
    for rank, results in enumerate(pool.call(communicating.calls, gathering * scattering, cases, gathering, scattering)):
        assert_close(results[0][0], (x @ weight + bias).chunk(scattering)[rank % scattering])


ACTIVATIONS = {"None": None, "gelu": F.gelu, "SiLU": F.silu, "relu": F.relu, "fastgelu": lambda y: y * torch.sigmoid(1.702 * y)}


@pytest.mark.cover(1, because="every dtype and activation is in the default run on one and two ranks")
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("ep", "tp"), GRIDS)
def test_all_to_all_all_gather_bmm(pool, ep, tp, act):
    """Every expert rank has C tokens for each of E experts; expert rank e owns the e-th part of the experts."""
    experts, own, capacity, width, columns = 2 * ep, 2, 2 * tp, 3 * tp, 5
    dtype = {"gelu": torch.bfloat16, "relu": torch.float16}.get(act, torch.float64)
    tokens = [tensor(experts, capacity, width, seed=e, dtype=dtype) for e in range(ep)]
    weight = tensor(experts, width, columns * tp, seed=20, dtype=dtype)
    bias = tensor(experts, columns * tp, seed=21, dtype=dtype)
    cases = []
    for shard, axis in ((0, 2), (1, 1)):
        arguments, keywords = [], []
        for rank in range(ep * tp):
            e, t = divmod(rank, tp)
            mine = slice(e * own, e * own + own)
            x, w, b = tokens[e].chunk(tp, axis)[t], weight[mine].chunk(tp, 2)[t], bias[mine].chunk(tp, 1)[t]
            arguments.append([x, w, "EP", ep, "TP", tp])
            outputs = {"need_allgather_out": True, "need_activation_feature": True}
            keywords.append({"bias": b[:, None] if shard else b, "shard_type": shard, "act_type": act, **outputs})
        cases += [("npu_all_to_all_all_gather_bmm", arguments, keywords)]
        cases += [("npu_all_to_all_all_gather_bmm", arguments, [{"shard_type": shard}] * (ep * tp))]
    for rank, results in enumerate(pool.call(communicating.calls, ep * tp, cases, ep, tp)):
        e, t = divmod(rank, tp)
        mine = slice(e * own, e * own + own)
        y2 = torch.cat([x[mine] for x in tokens], 1).double()
        plain = y2 @ weight[mine].chunk(tp, 2)[t].double()
        y3 = plain + bias[mine].chunk(tp, 1)[t][:, None].double()
        expected = (y3, y2) if act == "None" else (ACTIVATIONS[act](y3), y2, y3)
        for full, short in (results[:2], results[2:]):
            assert len(full) == len(expected)
            for got, wanted in zip((*full, short), (*expected, plain), strict=True):
                assert got.dtype == dtype
                assert_close(got, wanted, dtype)


@pytest.mark.cover(1, because="every dtype is in the default run on one and two ranks")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ep", "tp"), GRIDS)
def test_bmm_reduce_scatter_all_to_all(pool, ep, tp, dtype):
    """Expert rank e owns the e-th part of the experts and has the tokens of all expert ranks, one after the other."""
    experts, own, capacity, inner, width = 2 * ep, 2, 2 * tp, 3, 4 * tp
    x = tensor(experts, ep * capacity, inner * tp, dtype=dtype)
    weight = tensor(experts, inner * tp, width, seed=2, dtype=dtype)
    bias = tensor(experts, width, seed=3, dtype=dtype)
    cases = []
    for shard in (0, 1):
        arguments, keywords = [], []
        for rank in range(ep * tp):
            e, t = divmod(rank, tp)
            mine = slice(e * own, e * own + own)
            arguments.append([x[mine].chunk(tp, 2)[t], weight[mine].chunk(tp, 1)[t], "EP", ep, "TP", tp])
            part = bias[mine] if shard else bias[mine].chunk(tp, 1)[t]
            keywords.append({"bias": part[:, None] if shard else part, "shard_type": shard})
        cases += [("npu_bmm_reduce_scatter_all_to_all", arguments, keywords)]
        cases += [("npu_bmm_reduce_scatter_all_to_all", arguments, [{"shard_type": shard}] * (ep * tp))]
    plain = x.double() @ weight.double()
    whole = plain + bias[:, None].double()
    for rank, results in enumerate(pool.call(communicating.calls, ep * tp, cases, ep, tp)):
        e, t = divmod(rank, tp)
        tokens = slice(e * capacity, e * capacity + capacity)
        for shard, pair in ((0, results[:2]), (1, results[2:])):
            for got, product in zip(pair, (whole, plain), strict=True):
                assert got.dtype == dtype
                assert_close(got, product[:, tokens].chunk(tp, 1 if shard else 2)[t], dtype)


def plain_cases(dtype=torch.float32):
    x1, x2, residual, gamma = (tensor(*s, seed=n, dtype=dtype) for n, s in enumerate([(6, 4), (4, 5), (6, 5), (5,)]))
    x, weight, back = tensor(2, 4, 3, dtype=dtype), tensor(2, 3, 4, seed=2, dtype=dtype), tensor(2, 4, 3, seed=3, dtype=dtype)
    return x1, x2, residual, gamma, x, weight, back


def test_the_operators_are_registered_as_pytorch_wants_it(pool):
    x1, x2, residual, gamma, x, weight, back = plain_cases()
    rest = [gamma, None, None, None, None, "NAME", 1e-6]
    cases = [
        (MM, [x1, x2, residual, *rest]),
        (f"{MM}_", [x1, x2, residual, *rest]),
        ("npu_grouped_mat_mul_all_reduce", [[x1, x1[:0]], [x2, x2], None, "NAME"]),
        ("npu_all_to_all_all_gather_bmm", [x, weight, None, "NAME", "NAME", 0, "gelu"]),
        ("npu_bmm_reduce_scatter_all_to_all", [back, weight, None, "NAME", "NAME", 1]),
        ("lcal_coc_pure_matmul", [x1, x2, None, []]),
        ("lcal_coc_all_gather_matmul_v2", [x1, x2, None, ["NAME"]]),
    ]
    three = ("matmul_all_reduce", "all_gather_matmul", "matmul_reduce_scatter")
    cases += [(f"lcal_coc_{name}", [x1, x2, None, ["NAME"]]) for name in three]
    cases += [("lcal_coc_all_gather_matmul_reduce_scatter", [x1, x2, None, ["NAME", "NAME"]])]
    assert pool.call(communicating.registrations, 1, cases) == [len(cases)]


def test_they_compile_without_a_graph_break(pool):
    x1, x2, residual, gamma, x, weight, back = plain_cases(torch.bfloat16)
    cases = [
        (MM, [x1, x2, residual, gamma, "WORLD"], {}),
        (f"{MM}_", [x1, x2, residual, gamma, "WORLD"], {}),
        ("npu_grouped_mat_mul_all_reduce", [[x1, x1], [x2, x2], "WORLD"], {}),
        ("lcal_coc.matmul_all_reduce", [x1, x2, torch.zeros(6, 5).bfloat16(), "WORLD"], {}),
        ("lcal_coc.all_gather_matmul", [x1, x2, torch.zeros(6, 5).bfloat16(), "WORLD"], {}),
        ("npu_all_to_all_all_gather_bmm", [x, weight, "EP", 1, "TP", 1], {"act_type": "silu"}),
        ("npu_bmm_reduce_scatter_all_to_all", [back, weight, "EP", 1, "TP", 1], {}),
    ]
    assert pool.call(communicating.compiled, 1, cases) == [[True] * len(cases)]
    pool.leftovers.clear()  # torch keeps the graphs of compiled calls with their process groups; the worker is replaced


def test_they_run_in_inference_mode(pool):
    x1, x2, residual, gamma, x, weight, back = plain_cases()
    out = torch.zeros(6, 5)
    cases = [
        (MM, [[x1, x2, residual, gamma, "WORLD"]], None),
        (f"{MM}_", [[x1, x2, residual.clone(), gamma, "WORLD"]], None),
        ("npu_grouped_mat_mul_all_reduce", [[[x1, x1], [x2, x2], "WORLD"]], None),
        ("lcal_coc.matmul_all_reduce", [[x1, x2, out, "WORLD"]], None),
        ("npu_all_to_all_all_gather_bmm", [[x, weight, "EP", 1, "TP", 1]], None),
        ("npu_bmm_reduce_scatter_all_to_all", [[back, weight, "EP", 1, "TP", 1]], None),
    ]
    ((mm, in_place, grouped, coc, gathered, scattered),) = pool.call(communicating.calls_for_inference, 1, cases)
    expected = add_norm(x1.double() @ x2.double(), residual, gamma)
    for pair in (mm, in_place[:2]):
        for got, wanted in zip(pair, expected, strict=True):
            assert_close(got, wanted, torch.float32)
    for got in (*grouped, *coc):
        assert_close(got, x1.double() @ x2.double(), torch.float32)
    assert_close(gathered, x.double() @ weight.double(), torch.float32)
    assert_close(scattered, back.double() @ weight.double(), torch.float32)


def test_wrong_arguments_are_refused(pool):
    x1, x2, residual, gamma, x, weight, back = plain_cases()
    group = "npu_all_to_all_all_gather_bmm"
    scatter, grouped = "npu_bmm_reduce_scatter_all_to_all", "npu_grouped_mat_mul_all_reduce"
    gradient = "the operator has no gradient; call it on tensors that need none, or under torch.no_grad()"
    needs = x1.clone().requires_grad_()
    cases = {
        f"{MM}: x1 of shape (6, 4) and x2 of shape (5, 4) cannot be multiplied": (
            MM,
            [x1, x2.t(), residual, gamma, "WORLD"],
            {},
        ),
        f"{MM}: reduce_op is max, but must be sum": (MM, [x1, x2, residual, gamma, "WORLD", "max"], {}),
        f"{MM}: 3 is not a process group of this process": (MM, [x1, x2, residual, gamma, 3], {}),
        f"{MM}: residual of shape (5, 5) must have 6 rows of 5": (MM, [x1, x2, residual[1:], gamma, "WORLD"], {}),
        f"{MM}: x1, x2 and residual are torch.float32, torch.int8 and torch.float32, but an int8 x2 needs antiquant_scale": (
            MM,
            [x1, x2.char(), residual, gamma, "WORLD"],
            {},
        ),
        f"{MM}_: {gradient}": (f"{MM}_", [needs, x2, residual, gamma, "WORLD"], {}),
        f"{grouped}: x has 1 tensors, but there are 2 weights": (grouped, [[x1], [x2, x2], "WORLD"], {}),
        f"{grouped}: split_item 1 needs group_list": (grouped, [[x1], [x2], "WORLD"], {"split_item": 1}),
        f"{grouped}: split_item 2 does not support group_list": (
            grouped,
            [[x1], [x2], "WORLD"],
            {"split_item": 2, "group_list": [6]},
        ),
        "lcal_coc.matmul_all_reduce: bias must have shape (1, 5)": (
            "lcal_coc.matmul_all_reduce",
            [x1, x2, residual, "WORLD"],
            {"bias": x2},
        ),
        f"lcal_coc.pure_matmul: {gradient}": ("lcal_coc.pure_matmul", [needs, x2, residual], {}),
        f"{group}: shard_type is 2, but must be 0 (width) or 1 (rows)": (
            group,
            [x, weight, "EP", 1, "TP", 1],
            {"shard_type": 2},
        ),
        f"{group}: act_type is tanh, but must be one of none, gelu, fastgelu, relu, silu": (
            group,
            [x, weight, "EP", 1, "TP", 1],
            {"act_type": "tanh"},
        ),
        f"{group}: x of shape (2, 4, 3) and weight of shape (2, 4, 3) do not match 1 expert and 1 tensor ranks": (
            group,
            [x, back, "EP", 1, "TP", 1],
            {},
        ),
        f"{scatter}: x of shape (2, 4, 3) and weight of shape (2, 4, 3) cannot be multiplied": (
            scatter,
            [x, back, "EP", 1, "TP", 1],
            {},
        ),
        f"{scatter}: bias must have shape (2, 4) or (2, 1, 4)": (scatter, [back, weight, "EP", 1, "TP", 1], {"bias": gamma}),
    }
    (messages,) = pool.call(communicating.refusals, 1, list(cases.values()))
    assert messages == [f"MS505 {message}\n  fix: see the docstring of {message.partition(':')[0]}" for message in cases]
    (message,) = pool.call(communicating.refusals, 1, [(group, [x, weight, "EP", 2, "TP", 1], {})])[0]
    assert "has 1 ranks, but 2 are needed\n" in message
