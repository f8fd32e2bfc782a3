"""What kernels are built from and run on: vectors, memory access, compilation, jobs and threads."""
