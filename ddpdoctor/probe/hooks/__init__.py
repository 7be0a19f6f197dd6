"""What is wrapped, and whom it calls: patches alone. What is made of it is in ``observers``."""
