"""Rotary position embedding through the operator mindspeed::npu_rotary_position_embedding."""
