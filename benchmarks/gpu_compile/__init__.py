"""The kernels for GPUs compiled ahead of time, without a GPU: what each needs, and what to expect of them."""
