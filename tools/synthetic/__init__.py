"""What the makers of dummy models share: the sizes of the OPT family, and activity with published statistics."""
