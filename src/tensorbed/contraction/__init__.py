"""How rows of a chain of cores are computed: the chain, the plan for a batch of indices, and what executes it."""
