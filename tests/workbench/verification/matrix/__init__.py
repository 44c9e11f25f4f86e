"""Tests of the matrix and of bisect."""
