"""Files, units, checks, text and the machine. Every other package may use this one; it uses `errors` alone."""
