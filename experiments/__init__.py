"""Scripts over the library, and what they measured (`results/`); README.md says which does what."""
