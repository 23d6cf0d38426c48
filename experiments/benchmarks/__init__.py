"""Times the library and its kernels, and tunes the kernels for a device."""
