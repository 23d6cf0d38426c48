"""The options of scripts that have many."""
