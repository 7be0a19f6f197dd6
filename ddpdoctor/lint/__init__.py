"""Find misuse of DistributedDataParallel in training code without running it."""
