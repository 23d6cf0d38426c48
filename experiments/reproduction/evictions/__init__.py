"""Learned evictions beside each other: the plan, its jobs and its page."""
