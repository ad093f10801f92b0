"""The families of image models, one file each."""
