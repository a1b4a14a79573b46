"""The families of models, one file each; nothing outside this folder asks for one by name."""
