"""The compiled host kernels: building, finding and loading the shared library."""
