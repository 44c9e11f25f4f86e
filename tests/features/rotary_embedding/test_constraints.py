from tests.features.resolving import active


def test_level_one_switches_it_on_where_it_has_a_variant_and_positions_are_rotary():
    everywhere = {"has_variant": lambda op, platform: True}
    assert "rotary-embedding" in active(world_size=1, **everywhere)
    assert "rotary-embedding" not in active(world_size=1, rotary=False, **everywhere)
    assert "rotary-embedding" not in active(world_size=1, has_variant=lambda op, platform: False)
