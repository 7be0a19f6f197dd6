"""Compare what runs of different sizes train with."""
