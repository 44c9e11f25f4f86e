from tests.features.resolving import active


def test_level_one_switches_it_on_where_it_has_a_variant_and_the_norm_is_rms_norm():
    everywhere = {"has_variant": lambda op, platform: True}
    assert "rms-norm" in active(world_size=1, **everywhere)
    assert "rms-norm" not in active(world_size=1, normalization="LayerNorm", **everywhere)
    assert "rms-norm" not in active(world_size=1)
