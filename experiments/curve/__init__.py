"""The parts of `experiments/first_curve.py`: plan, data, jobs, analysis, figure, page."""
