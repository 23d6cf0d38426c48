"""Helpers that are shared by the tests of several packages."""
