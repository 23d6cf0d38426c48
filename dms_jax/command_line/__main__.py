"""`python -m dms_jax.command_line`: for use when `dms-jax` is not on the path."""

import sys

from dms_jax.command_line import main

if __name__ == "__main__":
    sys.exit(main())
