"""Generation: sampling, the engine, and parallel chains."""
