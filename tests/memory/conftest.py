"""What is away is poison, as under the emulation of a device, in the process of a test."""

import pytest

from mindspeed.features.device_emulation import absent
from mindspeed.memory.parked import Parked


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parked, "free", absent.fill_with_poison)
    monkeypatch.setattr(Parked, "give", absent.present_again(Parked.give))
