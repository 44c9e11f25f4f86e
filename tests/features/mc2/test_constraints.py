from mindspeed.plugins import World
from mindspeed.tensor_parallel.conditions import describe_fused_products
from tests.features.resolving import active, ask


def test_it_brings_sequence_parallelism_and_the_plan_says_so():
    assert {"mc2", "sequence-parallel", "tensor-parallel"} <= set(active("mc2", tp=2))
    (added,) = [feature for feature in ask("mc2", tp=2).features if feature.name == "sequence-parallel"]
    assert added.why[0].line == (
        "sequence-parallel: required by mc2, because mc2 fuses the all-gather and reduce-scatter of sequence parallelism "
        "with matrix products"
    )


def test_the_plan_says_that_the_reference_runs():
    notes = [row.text for row in ask("mc2", tp=2).rows if row.feature == "mc2"]
    assert "lcal_coc has only a plain-torch reference on cpu, which is slower; mindspeed ops list shows why" in notes


def notes_on_npu(**world: object) -> list[str]:
    made = World({"platform": "npu", "tp": 8, "dtype": "bf16", "hidden_size": 4096, "ffn_hidden_size": 11008, **world})
    return describe_fused_products(made)


def test_on_an_npu_the_plan_says_which_calls_run_and_where_the_reference_does():
    calls = "lcal_coc uses the kernels npu_all_gather_base_mm and npu_mm_reduce_scatter_base"
    assert notes_on_npu() == [calls]
    assert notes_on_npu(hidden_size=1024) == [
        calls,
        (
            "lcal_coc is replaced by its plain-torch reference for this product, because the attention of a rank 128 is "
            "outside of 256 to 65534"
        ),
    ]
    assert notes_on_npu(tp=3, dtype="fp32") == [
        (
            "lcal_coc is replaced by its plain-torch reference, because tp=3 is not 2, 4, 8 or 16 and the dtype is fp32, not "
            "bf16 or fp16"
        )
    ]
    assert notes_on_npu(platform="cpu") == []


def test_a_plan_for_npu_lists_the_calls():
    model = {"hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32, "num_query_groups": 8}
    asked = {"mc2": {}, "coc": {"coc": {"fused": True}}}
    for name, settings in asked.items():
        rows = ask(name, tp=8, platform="npu", dtype="bf16", settings=settings, **model).rows
        assert "lcal_coc uses the kernels npu_all_gather_base_mm and npu_mm_reduce_scatter_base" in [row.text for row in rows]
