"""The device profile of a drive and a processor: measured, kept, and used to choose a reader."""
