"""Report how a run compares with what the search of layouts predicted."""
