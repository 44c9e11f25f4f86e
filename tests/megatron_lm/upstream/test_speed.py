"""How long a check takes."""

import os
from pathlib import Path

import pytest

from tests.megatron_lm.checkout import VARIABLE
from tools.lint_speed import measured

pytestmark = [pytest.mark.long, pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no checkout")]


@pytest.mark.budget(300)
def test_one_command_takes_a_second_and_300_take_15_processor_seconds() -> None:
    seconds = measured(Path(os.environ[VARIABLE]))
    assert min(seconds["one"].values()) <= 1.0, "processor seconds are at least the wall seconds of an idle machine"
    assert seconds["many"]["processor"] <= 15.0
