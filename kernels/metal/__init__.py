"""Metal kernels: one `.metal` file with the text, one module with geometry, NumPy twin and typed call, for each."""
