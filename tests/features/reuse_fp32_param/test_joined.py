import pytest
import torch
from torch import Tensor

from mindspeed.features.reuse_fp32_param.joined import join, joined, split
from mindspeed.memory.windows import MainWeight, OptimizerWindow
from mindspeed.platforms.host_reads import host_reads
from tests.npu_contract.beside import count

BORDERS = (0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF)


def rejoined(words: Tensor) -> Tensor:
    """Split fp32 weights of these bits, and join them again from torch's bf16 form; returns the bits."""
    main = words.view(torch.float32)
    ((residual, ties),) = split([main], [None])
    assert (residual.dtype, ties.dtype) == (torch.int16, torch.int64)
    return join(main.bfloat16(), residual, ties, torch.empty_like(main)).view(torch.int32)


def assert_identity(words: Tensor) -> None:
    nan = words.view(torch.float32).isnan()
    again = rejoined(words)
    assert torch.equal(again[~nan], words[~nan])
    assert again.view(torch.float32)[nan].isnan().all()


def test_joining_what_was_split_is_the_identity_for_every_upper_half_and_nine_lower_ones() -> None:
    words = (torch.arange(2**16)[:, None] << 16) | torch.tensor(BORDERS)
    assert_identity(words.view(-1).to(torch.int32))


@pytest.mark.long
def test_joining_what_was_split_is_the_identity_for_ten_million_random_words() -> None:
    generator = torch.Generator().manual_seed(1)
    assert_identity(torch.randint(-(2**31), 2**31, (10_000_000,), dtype=torch.int32, generator=generator))


def test_only_ties_have_a_place_and_a_direction() -> None:
    words = torch.tensor([0x3F800000, 0x3F808000, 0x3F818000, 0x3F807FFF] * 2, dtype=torch.int32)
    ((residual, ties),) = split([words.view(torch.float32)], [None])
    assert (residual == -0x8000).sum() == 4
    assert ties.tolist() == [2, 5, 10, 13]  # the even one went down, the odd one up


def test_a_residual_is_written_into_the_tensor_that_is_given() -> None:
    main = torch.randn(5)
    kept = torch.empty(5, dtype=torch.int16)
    assert split([main], [kept])[0][0] is kept


def test_a_window_reads_the_device_once_and_a_weight_moves_few_bytes() -> None:
    sizes = [(64, 64), (3, 5), (7,), (128, 64)]
    mains = [torch.randn(size) for size in sizes]
    mains[2].view(torch.int32)[:] = 0x3F808000
    weights = [MainWeight(main, main.bfloat16(), 0, torch.optim.AdamW([main])) for main in mains]
    expected = [main.clone() for main in mains]
    with joined(OptimizerWindow(tuple(weights), "load")):
        pass
    numbers = sum(main.numel() for main in expected)

    def window() -> None:
        with joined(OptimizerWindow(tuple(weights))):
            found.extend(weight.main.clone() for weight in weights)

    found: list[Tensor] = []
    with host_reads() as reads:
        window()
    assert all(map(torch.equal, found, expected))
    assert [read.operation for read in reads] == ["nonzero", "tolist"], reads  # the second finds the device idle
    counted = count(window)
    assert counted.bytes <= 34 * numbers, counted  # 8 of them for the copy here


def managed() -> tuple[MainWeight, Tensor]:
    """A main weight of a matrix, and what it was."""
    main = torch.randn(3, 5)
    return MainWeight(main, main.bfloat16(), 0, torch.optim.AdamW([main])), main.clone()


def test_main_weights_exist_only_inside_a_window() -> None:
    weight, before = managed()
    with joined(OptimizerWindow((weight,), "load")):
        pass
    assert weight.main.untyped_storage().nbytes() == 0
    with joined(OptimizerWindow((weight,))):
        assert torch.equal(weight.main, before)
        weight.main.add_(1e-3)
        assert weight.weight is not None
        weight.weight.copy_(weight.main)
    assert weight.main.untyped_storage().nbytes() == 0
    with joined(OptimizerWindow((weight,))):
        assert torch.equal(weight.main, before + 1e-3)


def test_what_a_checkpoint_keeps_stays_and_is_not_what_the_next_step_writes() -> None:
    weight, before = managed()
    with joined(OptimizerWindow((weight,), "load")):
        pass
    with joined(OptimizerWindow((weight,), "save")):
        kept = weight.main.detach()
    with joined(OptimizerWindow((weight,))):
        weight.main.zero_()
    assert torch.equal(kept, before)


def test_what_a_checkpoint_loads_reaches_the_weights_of_the_model() -> None:
    weight, before = managed()
    for _ in range(2):
        with joined(OptimizerWindow((weight,), "load")):
            weight.main.copy_(before * 3)
    assert torch.equal(weight.weight, (before * 3).bfloat16())  # type: ignore[arg-type]
    with joined(OptimizerWindow((weight,), "save")):
        assert torch.equal(weight.main, before * 3)
