"""Metal kernels. Each has a `.metal` file with its text, and a module with its geometry, reference and typed call."""
