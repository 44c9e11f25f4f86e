"""Flags of MindSpeed and MindSpeed-LLM on a command line: the features and arguments of Megatron-LM that they mean."""
