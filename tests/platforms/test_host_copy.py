"""Copies to the host on a device with streams, which writes down what it is told."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mindspeed.platforms import host_copy, runtime
from mindspeed.platforms.host_copy import HostCopy


class Device:
    """A device whose calls are lines of ``said``."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._current = "compute"

    def Stream(self) -> SimpleNamespace:  # noqa: N802 - a name of torch.cuda
        return self._stream("side")

    def current_stream(self) -> SimpleNamespace:
        return self._stream(self._current)

    @contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self._current = self._current, stream.name
        yield
        self._current = before

    def say(self, what: str) -> None:
        self.said.append(f"{self._current}: {what}")

    def _stream(self, name: str) -> SimpleNamespace:
        event = SimpleNamespace(synchronize=lambda: self.say("the host waits for the copy"))
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.say(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.say(f"{name} waits for the copy"),
            record_event=lambda: event,
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(runtime, "platform", lambda: "cuda")
    monkeypatch.setattr(runtime, "device_module", lambda: made)
    monkeypatch.setattr(host_copy, "host_tensor", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(host_copy, "_streams", [])
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: made.say(f"the tensor is used on {stream.name}"))
    return made


def test_counts_are_copied_beside_what_is_computed_after_them(device: Device) -> None:
    def received() -> Tensor:
        device.say("the collective is waited for")
        return torch.tensor([1, 2])

    copy = HostCopy(received)
    device.say("a permutation")
    assert copy.wait().tolist() == [1, 2]
    assert copy.on_device().tolist() == [1, 2]
    assert device.said == [
        "compute: side waits for compute",
        "side: the collective is waited for",
        "side: the tensor is used on side",
        "compute: a permutation",
        "compute: the host waits for the copy",
        "compute: compute waits for the copy",
    ]


def test_without_a_copy_the_current_stream_waits_for_the_collective(device: Device) -> None:
    copy = HostCopy(lambda: torch.tensor([1]), posted=False)
    assert device.said == []
    assert copy.on_device().tolist() == [1]
    assert device.said == []


def test_on_the_cpu_a_tensor_is_copied_at_once_and_a_collective_waited_for_late() -> None:
    source, waited = torch.tensor([1]), []
    at_once, late = HostCopy(source), HostCopy(lambda: waited.append(True) or source)
    source.add_(1)
    assert waited == []
    assert (at_once.wait().tolist(), late.wait().tolist(), waited) == ([1], [2], [True])
