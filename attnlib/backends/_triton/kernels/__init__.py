"""The Triton kernels. They are imported only when a kernel is launched."""
