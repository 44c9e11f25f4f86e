"""A model repository on top of Megatron, in MindSpeed's style."""
