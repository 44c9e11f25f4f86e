"""Configurations of the compiler."""
