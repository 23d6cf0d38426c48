"""Client programs for a scripted server: `python FILE ADDRESS`; each fails on a wrong answer.

`make clients` fetches their packages.
"""
