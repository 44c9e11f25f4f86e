"""Replicas of the model, one share of the batch each."""
