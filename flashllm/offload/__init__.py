"""Engine B: throughput-oriented generation by offloading (FlexGen, paper B). It knows nothing of the flash engine."""
