"""Old names leave nothing behind: every test starts and ends without a list, registrations, arguments and a plan."""

import sys
from collections.abc import Iterator

import pytest

from mindspeed import args_utils, registry
from mindspeed.compat import activation
from mindspeed.compat.manager import MindSpeedFeaturesManager
from mindspeed.compat.patches import MindSpeedPatchesManager
from mindspeed.engine.runtime import session
from mindspeed.ops import variants
from mindspeed.problems import MindSpeedError, Problem


@pytest.fixture(autouse=True)
def old_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert session.current() is None
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("MINDSPEED_PLATFORM", "cpu")
    monkeypatch.setenv("MINDSPEED_REPORT", "")
    monkeypatch.setattr(variants, "has_variant", lambda op, platform: False)  # level 1 would add features to every plan
    monkeypatch.setattr(args_utils, "_MINDSPEED_ARGS", None)
    monkeypatch.setattr(activation, "_state", activation._State())
    yield
    registry.deactivate()
    MindSpeedFeaturesManager.set_features_list(MindSpeedFeaturesManager.create_features_list())
    MindSpeedPatchesManager.registrations.clear()
    MindSpeedPatchesManager.patches_info.clear()
    registry.provide(())


def problems_of(call: object, *args: object, **kwargs: object) -> tuple[Problem, ...]:
    """The problems that a call raises."""
    with pytest.raises(MindSpeedError) as caught:
        call(*args, **kwargs)  # type: ignore[operator]
    return caught.value.problems
