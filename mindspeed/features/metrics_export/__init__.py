"""Numbers of each step in Weights & Biases, Prometheus and OpenTelemetry."""
