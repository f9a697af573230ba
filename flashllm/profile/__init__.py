"""The profile of a machine and a drive: measured, kept, and used to choose a reader and to plan."""
