"""DeepSpeed: the engine of one model, what of it rests in host memory, and the bytes that it takes."""
