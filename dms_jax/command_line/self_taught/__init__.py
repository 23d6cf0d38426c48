"""The stages of `dms-jax retrofit self-taught`; each leaves files and goes on from them."""
