"""Files, units, checks, text and the machine: what every other package may use, and which uses none of them."""
