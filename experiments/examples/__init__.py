"""The library inside others: reinforcement learning with tunix, replicas behind Ray Serve."""
