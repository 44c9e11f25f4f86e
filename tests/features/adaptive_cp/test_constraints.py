import pytest

from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from mindspeed.engine.resolution.resolver import resolve
from tests.features.resolving import CATALOG, MODEL, refusals

NAME = "adaptive-cp"


def refused(*more, **settings):
    return refusals(NAME, *more, cp=4, settings={NAME: settings})


def test_without_a_mask_it_is_refused():
    layer = Layer("command line", features=(NAME,), without=("shared-attention-mask",), world={**MODEL, "cp": 2})
    (problem,) = resolve([layer], CATALOG, made_up("cpu", "0.16.1"), has_variant=lambda op, platform: False).problems
    assert f"{problem.code} {problem.message} | {problem.fix_text}" == (
        "MS210 adaptive-cp requires shared-attention-mask, because adaptive-cp balances work for one mask that is known "
        "before training (not required with --set adaptive-cp.dynamic_mask=true, which reads the mask of each batch), "
        "and command line removes shared-attention-mask "
        "| drop --without shared-attention-mask, or remove adaptive-cp"
    )


@pytest.mark.parametrize("other", ["alibi", "eod-reset"])
def test_what_it_cannot_do_is_a_conflict(other):
    assert any("adaptive-cp" in text and text.startswith("MS202 ") for text in refused(other))
