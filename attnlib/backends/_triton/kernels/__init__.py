"""The Triton kernels; nothing here is imported before a kernel is launched."""
