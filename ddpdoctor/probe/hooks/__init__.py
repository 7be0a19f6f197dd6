"""One file per thing the probe watches; each has an ``install(module)``."""
