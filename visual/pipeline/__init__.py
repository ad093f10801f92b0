"""From a prompt or a class to images, by diffusers' conventions."""
