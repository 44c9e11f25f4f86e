"""The merge of attention blocks through the operator mindspeed::npu_ring_attention_update."""
