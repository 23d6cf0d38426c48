"""What made the pages of `results/` and chose the settings in them."""
