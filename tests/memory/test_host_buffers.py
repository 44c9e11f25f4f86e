"""Buffers on the host: taken again where they fit, and freed where nothing uses their size."""

import random

import torch

from mindspeed.memory.on_host import HostBuffers, OnHost


def step(buffers: HostBuffers, sizes: list[int]) -> None:
    """Offload and bring back what one step keeps."""
    taken = [buffers.take(size) for size in sizes]
    for buffer in reversed(taken):
        buffers.give_back(buffer)


def test_steps_of_variable_length_hold_at_most_twice_what_one_needs() -> None:
    draw, buffers, most = random.Random(5), HostBuffers(), 0
    for _ in range(200):
        length = draw.randrange(64, 2048)
        sizes = [length * width for width in (64, 64, 256, 128, 512)]
        step(buffers, sizes)
        most = max(most, sum(sizes))
        assert buffers.held <= 2 * 1.25 * most


def test_steps_of_one_length_take_the_same_buffers() -> None:
    buffers = HostBuffers()
    step(buffers, [100, 100, 300])
    assert buffers.held == 500
    places = sorted(buffer.data_ptr() for buffer in [buffers.take(100), buffers.take(100), buffers.take(300)])
    assert len(set(places)) == 3
    assert buffers.held == 500


def test_a_size_that_is_used_no_more_is_freed() -> None:
    buffers = HostBuffers()
    step(buffers, [1000])
    for size in (10_000, 20_000, 30_000):
        step(buffers, [size])
    assert buffers.held == 60_000
    step(buffers, [30_000])
    assert buffers.held == 60_000
    step(buffers, [40_000])
    assert buffers.held == 70_000  # 30,000 and 40,000


def test_contents_come_back_from_a_larger_buffer() -> None:
    buffers = HostBuffers()
    buffers.give_back(buffers.take(120))
    tensor = torch.arange(25, dtype=torch.float32)
    storage = tensor.untyped_storage()
    source = OnHost([storage], buffers)
    source.settle()
    tensor.zero_()
    source.start([storage])
    source.give([storage])
    source.release()
    assert tensor.tolist() == list(range(25))
    assert buffers.held == 120
