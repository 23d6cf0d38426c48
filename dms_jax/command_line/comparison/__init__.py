"""What `experiments/compare.py` is made of: who is compared, what is measured, how it is shown."""
