"""Check the contract of features: for authors, by `mindspeed.plugins.testing` and ``mindspeed features test``."""
