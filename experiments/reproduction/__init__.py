"""Scripts behind the pages of `results/`."""
