"""Tests of the simulation of exposed time."""
