"""The machine on which this process runs: free memory, cores, pages of memory-mapped files, and locks for forks."""
