"""DeepSpeed: the engine of one model, its tensors that rest in host memory, and the bytes that it takes."""
