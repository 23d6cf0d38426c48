"""Plain NumPy float64 simulations of every policy, written from the papers alone."""
