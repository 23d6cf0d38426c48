"""The stages of `experiments.retrofit self-taught`; each leaves files and goes on from them."""
