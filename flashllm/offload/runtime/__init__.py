"""The throughput engine's runtime: executes what the planner decides (paper B, section 4)."""
