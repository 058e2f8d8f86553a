"""Where other libraries keep models, told about the layers of this one. Each is imported on demand."""
