"""How the nodes of a job meet and what they try on each other; the checks in ``nodes`` judge it."""
