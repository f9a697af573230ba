"""How weights lie in codes: bytes and numpy, no files and no models."""
