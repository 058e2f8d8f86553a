"""How rows, bags and scores are computed: a folder for each backend, and what they have in common."""
