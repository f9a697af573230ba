"""What a drive and a processor cost: measured, kept, and used to choose a reader."""
