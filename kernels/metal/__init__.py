"""Metal kernels. NAME.metal is a kernel's text; NAME.py has its grid, its NumPy reference and a function to call it."""
