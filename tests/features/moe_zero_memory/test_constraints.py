from mindspeed.features.moe_zero_memory.layers import has_level1


def test_layers_of_a_stage_count_across_its_chunks():
    # 8 layers on 2 stages with 2 chunks each: a stage has layers 1, 2, 5, 6 or 3, 4, 7, 8
    chosen = [[n for n in range(1, 9) if has_level1(n, 8, 2, 2, limit)] for limit in (0, 1, 2, 3, None)]
    assert chosen == [[], [1, 3], [1, 3, 5, 7], [1, 2, 3, 4, 5, 7], [*range(1, 9)]]
