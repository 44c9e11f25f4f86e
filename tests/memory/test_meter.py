import torch

from mindspeed import platforms
from mindspeed.memory.byte_count import Bytes
from mindspeed.memory.meter import Meter
from mindspeed.platforms.cpu_host import mark_host


def test_a_storage_counts_from_its_making_to_its_end():
    with Meter() as meter:
        tensor = torch.empty(10)
        view = tensor[2:]
        assert meter.live == Bytes(host=40)
        del tensor
        assert meter.live == Bytes(host=40)
        del view
        assert meter.live == Bytes()
    assert meter.peak == Bytes(host=40)


def test_a_resized_storage_counts_its_new_size():
    with Meter() as meter:
        tensor = torch.empty(10)
        tensor.untyped_storage().resize_(0)
        assert meter.live == Bytes()
        tensor.untyped_storage().resize_(80)
        assert meter.live == Bytes(host=80)
        other = torch.empty(0).resize_(3)
        assert meter.live == Bytes(host=92)
    assert other.numel() == 3


def test_storages_from_before_do_not_count():
    before = torch.zeros(10)
    with Meter() as meter:
        before.add_(1)
        before.view(2, 5)
        assert meter.live == Bytes()


def test_bytes_have_owners():
    with Meter() as meter:
        with meter.owner("first"):
            first = torch.empty(2)
        second = torch.empty(3)
        assert meter.by_owner() == {"first": Bytes(host=8), "": Bytes(host=12)}
        del first
        assert meter.by_owner() == {"first": Bytes(), "": Bytes(host=12)}
    assert second.numel() == 3


def test_what_backward_makes_counts():
    weight = torch.ones(4, requires_grad=True)
    with Meter() as meter:
        (weight * 2).sum().backward()
        assert meter.live == Bytes(host=16)


def test_tensors_of_the_cpu_platform_are_on_the_device_unless_they_are_marked(monkeypatch):
    monkeypatch.setattr(platforms, "ACTIVE", "cpu")
    with Meter() as meter:
        device, host = torch.empty(10), mark_host(torch.empty(3))
        assert meter.live == meter.peak == Bytes(device=40, host=12)
    assert device.numel() == 10 * host.ndim


def test_the_resize_of_torch_is_itself_again_afterwards():
    before = torch.UntypedStorage.resize_
    with Meter():
        pass
    assert torch.UntypedStorage.resize_ is before
