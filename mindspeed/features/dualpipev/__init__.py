"""DualPipeV: forward and backward passes of two chunks at once, on stages that are placed as a V."""
