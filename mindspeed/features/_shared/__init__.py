"""What several features share: plain torch, and the places where it enters Megatron."""
