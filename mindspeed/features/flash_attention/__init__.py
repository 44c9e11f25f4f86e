"""Attention without the score matrix through the operator mindspeed::fusion_attention."""
