from tests.features.resolving import active, not_checked, overrides, refusals


def test_a_model_with_learned_positions_is_refused():
    assert refusals("rotary-embedding", world_size=1) == []
    assert refusals("rotary-embedding", world_size=1, rotary=False) == [
        "MS304 rotary-embedding: the positions of the model are not rotary | --rotary, or remove rotary-embedding"
    ]


def test_unknown_positions_are_not_checked():
    assert not_checked("rotary-embedding") == ["'the positions of the model are not rotary' depends on rotary; give --rotary"]


def test_level_one_switches_it_on_where_it_has_a_variant_and_positions_are_rotary():
    everywhere = {"has_variant": lambda op, platform: True}
    assert "rotary-embedding" in active(world_size=1, **everywhere)
    assert "rotary-embedding" not in active(world_size=1, rotary=False, **everywhere)
    assert "rotary-embedding" not in active(world_size=1, has_variant=lambda op, platform: False)


def test_megatron_then_calls_its_unfused_function():
    assert overrides("rotary-embedding") == {"apply_rope_fusion": False}
