"""NumPy float64 simulations of every policy, written only from the papers."""
