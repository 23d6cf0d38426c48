"""Retrofitting: losses, schedules, recipes, the step and the loop."""
