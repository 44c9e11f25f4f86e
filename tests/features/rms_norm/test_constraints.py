from tests.features.resolving import active, not_checked, refusals


def test_a_model_with_another_norm_is_refused():
    assert refusals("rms-norm", world_size=1) == []
    assert refusals("rms-norm", world_size=1, normalization="LayerNorm") == [
        "MS304 rms-norm: normalization is LayerNorm, not RMSNorm | --normalization RMSNorm, or remove rms-norm"
    ]


def test_an_unknown_norm_is_not_checked():
    assert not_checked("rms-norm") == ["'normalization is ?, not RMSNorm' depends on normalization; give --normalization"]


def test_level_one_switches_it_on_where_it_has_a_variant_and_the_norm_is_rms_norm():
    everywhere = {"has_variant": lambda op, platform: True}
    assert "rms-norm" in active(world_size=1, **everywhere)
    assert "rms-norm" not in active(world_size=1, normalization="LayerNorm", **everywhere)
    assert "rms-norm" not in active(world_size=1)
