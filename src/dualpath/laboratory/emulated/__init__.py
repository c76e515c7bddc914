"""An engine whose kernels are a cost model; router, data path, files and bytes are real."""
