"""What `dms-jax compare` is made of: who is compared, what is measured, how it is shown."""
