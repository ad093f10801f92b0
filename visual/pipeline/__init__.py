"""From a prompt or a class to pictures, by diffusers' conventions."""
