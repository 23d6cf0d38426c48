"""The parts of `first_curve.py`: plan, data, jobs, analysis, figure, page."""
