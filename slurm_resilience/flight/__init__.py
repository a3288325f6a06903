"""A hung training's collectives, as PyTorch's Flight Recorder dumped them: the rank at fault."""
