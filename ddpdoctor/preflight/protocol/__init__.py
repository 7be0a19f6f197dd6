"""How the nodes of a job meet and test each other. The checks in ``nodes`` judge the results."""
