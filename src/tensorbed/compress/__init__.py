"""Models with their tables compressed: which, into what, how well."""
