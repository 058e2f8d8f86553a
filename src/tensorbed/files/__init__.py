"""Files of layers and models: safetensors with a description, written whole or not at all."""
