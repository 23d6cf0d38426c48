"""Scripts that use the library, and their results (`results/`); README.md lists them."""
