"""Pictures of plans and runs for pages: graphs, curves and timelines."""
