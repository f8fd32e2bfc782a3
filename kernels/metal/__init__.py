"""Metal kernels: one `.metal` file with the text, one module with geometry, reference and typed call, for each."""
