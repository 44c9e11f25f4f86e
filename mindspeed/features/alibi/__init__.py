"""Linear position bias."""
