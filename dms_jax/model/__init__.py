"""The transformer of all supported families."""
