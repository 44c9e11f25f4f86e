"""What several features share: plain torch, no Megatron."""
