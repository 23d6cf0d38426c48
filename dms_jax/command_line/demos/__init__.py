"""The two parts of `make demo`."""
