"""The families of models, one file each; code outside this folder depends on none of them by name."""
