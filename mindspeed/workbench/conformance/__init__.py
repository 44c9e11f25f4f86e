"""Check the contract of features: for authors, by `mindspeed.workbench.conformance.testing` and ``mindspeed features test``."""
