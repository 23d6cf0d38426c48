"""The stages of `dms-jax retrofit self-taught`; each writes files and resumes from them."""
