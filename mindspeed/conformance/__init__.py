"""Check the contract of features: for authors, by `mindspeed.conformance.testing` and ``mindspeed features test``."""
