"""Data: Grain sources, packing, filters and synthetic tasks."""
