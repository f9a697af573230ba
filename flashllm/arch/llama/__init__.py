"""Llama 1 to 3 (Touvron et al., 2023; Grattafiori et al., 2024) and models under its names, a row each."""
