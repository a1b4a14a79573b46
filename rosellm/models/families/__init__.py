"""The families of models, one file each; code outside this folder does not depend on any of them by name."""
