"""The model: definition, attention, checkpoints and the training of the model that ships."""
