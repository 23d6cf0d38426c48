"""What times the library and its kernels, and what tunes the kernels for a device."""
