"""The hardware of the throughput engine: measured, fitted, or known by name."""
