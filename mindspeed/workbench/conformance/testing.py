"""The conformance kit for feature authors.

In a test file of a package with features:

>>> from mindspeed.workbench.conformance.testing import conformance
>>> test_conformance = conformance("acme-mindspeed")

or without any file, ``pytest --mindspeed-dist acme-mindspeed``, or without pytest, ``mindspeed features test
acme-mindspeed``. Wherever mindspeed is installed pytest also has the fixtures ``fake_megatron`` and ``on_ranks`` of
`mindspeed.workbench.conformance.pytest_plugin`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.workbench.conformance.fake_megatron import FakeMegatron, fake_megatron
from mindspeed.workbench.conformance.outcome import Outcome
from mindspeed.workbench.conformance.suite import CHECKS, examine

__all__ = ["CHECKS", "FakeMegatron", "Outcome", "conformance", "examine", "fake_megatron"]


def conformance(name: str, parity: bool = False) -> Callable[..., Any]:
    """A parametrized test function: every check of every feature of a distribution, or of one feature.

    With ``parity``, or under ``pytest --mindspeed-parity``, the claim about numerics is proven too, in processes of its
    own. Raises ResolutionError when nothing is called ``name``.
    """
    import pytest

    from mindspeed.workbench.conformance.pytest_plugin import cases, judge

    pairs = cases(name)

    @pytest.mark.parametrize(("feature", "check"), pairs, ids=[f"{feature}-{check}" for feature, check in pairs])
    def test_conformance(feature: str, check: str, request: pytest.FixtureRequest) -> None:
        asked = bool(request.config.getoption("--mindspeed-parity", False))
        judge(name, feature, check, parity or asked)

    return test_conformance
