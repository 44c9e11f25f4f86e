from mindspeed.engine.resolution.environment import made_up
from mindspeed.engine.resolution.request import Layer
from tests.features.resolving import MODEL, ask

ARGUMENT = "gradient_accumulation_fusion"


def test_megatrons_own_flag_takes_it_out():
    flag = "Megatron's --no-gradient-accumulation-fusion"
    layer = Layer(flag, world=MODEL | {"world_size": 1}, without=("matmul-add",), option="--no-gradient-accumulation-fusion")
    from mindspeed.engine.resolution.resolver import resolve
    from tests.features.resolving import CATALOG

    resolution = resolve([layer], CATALOG, made_up("cpu", "0.16.1"), has_variant=lambda op, platform: True)
    assert not resolution.problems
    assert "matmul-add" not in [feature.name for feature in resolution.features]
    (row,) = [row for row in resolution.rows if row.feature == "matmul-add"]
    assert (row.kind, row.text) == ("left-out", f"removed by {flag}")


def test_it_suits_every_model():
    assert ask("matmul-add", world_size=1, normalization="LayerNorm", activation="gelu").problems == []
