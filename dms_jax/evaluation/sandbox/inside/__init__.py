"""What runs in a confined process: it locks itself in, then runs code that a model wrote.

The process starts as `python -m inside` without site-packages, so nothing here imports anything but
the standard library and its neighbours.
"""
