"""`python -m dms_jax.command_line`: `dms-jax` where that is not on the path."""

import sys

from dms_jax.command_line import main

if __name__ == "__main__":
    sys.exit(main())
