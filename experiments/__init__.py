"""The paper's tasks, run for real. Not part of the library: only the public names of tensorbed are used here."""
