"""A debugger and diagnostics toolkit for PyTorch DistributedDataParallel jobs."""

__version__ = "0.1.0"
