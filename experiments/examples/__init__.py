"""The library inside other frameworks: tunix (reinforcement learning), Ray Serve (replicas)."""
