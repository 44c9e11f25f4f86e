"""Pages made from what the code declares: features, errors, hooks, settings, the command line, support."""
