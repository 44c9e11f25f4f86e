"""Count the floating-point operations of training steps."""
