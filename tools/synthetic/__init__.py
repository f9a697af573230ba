"""The sizes of the OPT family, and activity with published statistics, for the makers of dummy models."""
