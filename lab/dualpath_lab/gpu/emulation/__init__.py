"""vLLM's CUDA build and dualpath's CUDA code on a machine without a GPU; ``environment`` makes it.

GPU memory is host memory, kernels are torch's on the CPU, and copies are made by threads.
"""
