"""What every feature must be, checked: for authors, by `mindspeed.plugins.testing` and ``mindspeed features test``."""
