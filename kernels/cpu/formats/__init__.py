"""Storage formats: kernels that read blocks of quantised weights as they are stored in a file."""
