"""The code of a confined process: it locks itself in, then runs model-written code.

The process starts as `python -m inside` without site-packages, so modules here import only the
standard library and each other.
"""
